"""Optimizer state of the segments of one bucket."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_zero.sharding import Bucket, Segment

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

    def get(self, segment: Segment) -> State:
        """State as the optimizer wants it for this segment: views of the flat tensors, and the scalars."""
        if segment not in self:
            return {}
        views = {name: self.flat[name][segment.start : segment.stop] for name in self._names[segment]}
        return views | self._scalars[segment]

    def put(self, segment: Segment, state: State) -> None:
        """Take over what an update left behind; tensors that are views from :meth:`get` stay where they are."""
        names = tuple(name for name, value in state.items() if self._is_flat(name, value, segment.numel))
        for name in names:
            view = self.ensure(name, state[name].dtype)[segment.start : segment.stop]
            if view.data_ptr() != state[name].data_ptr():
                view.copy_(state[name].reshape(-1))
        self._names[segment] = names
        self._scalars[segment] = {name: value for name, value in state.items() if name not in names}

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
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.flat.values())

    def _is_flat(self, name: str, value: Any, numel: int) -> bool:
        # The names are known from a trial; a group that joins later may keep more than was tried.
        return isinstance(value, Tensor) and (name in self._per_element or value.numel() == numel > 1)
