"""Optimizer state of the segments of one bucket."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from lightning_zero.sharding import Bucket, Run, Segment
from lightning_zero.storage import Memory

State = dict[str, Any]


class ShardState:
    """State of one bucket's segments under one optimizer.

    Per-element state (``exp_avg``, ...) lives in one 1-D tensor per name, laid out as the shard, in the bucket's
    optimizer store. Scalar state (``step``, ...) is kept per segment. A segment has none before its first update.

    Args:
        bucket: the bucket.
        per_element: names of the state that has one value per element.
        dtype: of all per-element state; ``None``: whatever the optimizer gives it.
    """

    def __init__(self, bucket: Bucket, per_element: frozenset[str], dtype: torch.dtype | None = None) -> None:
        self._store = bucket.placement.optimizer_store
        self._numel = bucket.layout.shard_numel
        self._numels = bucket.layout.numels
        self._formats = bucket.formats
        self._per_element = per_element
        self._dtype = dtype
        self.flat: dict[str, Tensor] = {}  # by name; 1-D, Ψ/S
        self._scalars: dict[Segment, State] = {}
        self._names: dict[Segment, tuple[str, ...]] = {}  # the per-element state that a segment has

    def __contains__(self, segment: Segment) -> bool:
        return segment in self._scalars

    def key(self, segment: Segment) -> Hashable:
        """Equal for segments that may be updated as one: all their state is equal, apart from per-element values."""
        scalars = self._scalars.get(segment, {})
        return self.names(segment), tuple((name, _comparable(value)) for name, value in scalars.items())

    def get(self, run: Run) -> State:
        """State as the optimizer wants it for segments of one key, or a part of them, as if they were one.

        Per-element state are views of the flat tensors. Scalars are copies, but for those of one whole segment.
        """
        first = run.segments[0]
        if first not in self:
            return {}
        views = {name: self.flat[name][run.start : run.stop] for name in self._names[first]}
        scalars = self._scalars[first]
        return views | (scalars if run == Run.of(first) else _copies(scalars))

    def put(self, run: Run, state: State) -> None:
        """Take over what an update left behind; tensors that are views from :meth:`get` stay where they are."""
        names = tuple(name for name, value in state.items() if self._is_flat(name, value, run.numel))
        for name in names:
            view = self.ensure(name, state[name].dtype)[run.start : run.stop]
            if view.data_ptr() != state[name].data_ptr():
                view.copy_(state[name].reshape(-1))
        scalars = {name: value for name, value in state.items() if name not in names}
        first, *others = run.segments
        self.put_scalars(first, scalars, names)
        for segment in others:  # each has its own, which the next update changes in place
            # Equal names stay the objects that they are: the bytes of a pickle depend on which of them are one.
            known = {name: None for name in self._scalars.get(segment, ()) if name in scalars}
            same = self.names(segment) == names
            self.put_scalars(segment, known | _copies(scalars), self.names(segment) if same else names)

    def put_slice(self, segment: Segment, state: State, dtype: torch.dtype) -> None:
        """Take over this segment's part of a full parameter's ``state`` (tensors in the parameter's shape).

        What has one floating-point value per element becomes ``dtype``.
        """
        names, scalars = [], {}
        for name, value in state.items():
            if self._is_flat(name, value, self._numels[segment.param]):
                kind = dtype if name in self._per_element and value.is_floating_point() else value.dtype
                into = self.ensure(name, kind)[segment.start : segment.stop]
                self._formats[segment.param].read(value, segment.param_start, into)
                names.append(name)
            else:
                scalars[name] = value.detach().clone() if isinstance(value, Tensor) else value
        self.put_scalars(segment, scalars, tuple(names))

    def read(self, name: str, dtype: torch.dtype, start: int, stop: int) -> Tensor:
        """Elements ``[start, stop)`` of the flat tensor called ``name``; zeros of ``dtype`` where there is none."""
        if name in self.flat:
            return self.flat[name][start:stop]
        return torch.zeros(stop - start, dtype=self._dtype or dtype, device=self._store.device)

    def ensure(self, name: str, dtype: torch.dtype) -> Tensor:
        """The flat tensor called ``name``, to be written; made on first use."""
        if name not in self.flat:
            self.flat[name] = self._store.zeros(self._numel, self._dtype or dtype)
        return self.flat[name]

    def scalars(self, segment: Segment) -> State:
        """The scalar state of a segment."""
        return self._scalars[segment]

    def names(self, segment: Segment) -> tuple[str, ...]:
        """The per-element state that a segment has."""
        return self._names.get(segment, ())

    def put_scalars(self, segment: Segment, scalars: State, names: tuple[str, ...]) -> None:
        """Set the scalar state of a segment whose state called ``names`` was updated where it is."""
        self._scalars[segment] = scalars
        self._names[segment] = names

    def clear(self) -> None:
        """Forget everything, as before the first update."""
        self.flat, self._scalars, self._names = {}, {}, {}

    @property
    def memory(self) -> Memory:
        """The memory in which per-element state rests."""
        return self._store.memory

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.flat.values())

    def _is_flat(self, name: str, value: Any, numel: int) -> bool:
        # The names are known from a trial; a group that joins later may keep more than was tried.
        return isinstance(value, Tensor) and (name in self._per_element or value.numel() == numel > 1)


def _copies(scalars: State) -> State:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in scalars.items()}


def _comparable(value: Any) -> Hashable:
    return (value.dtype, tuple(value.flatten().tolist())) if isinstance(value, Tensor) else value
