"""Optimizer state of the segments of one bucket."""

from __future__ import annotations

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from lightning_zero.ops import Quantized
from lightning_zero.sharding import Bucket, Run, Segment
from lightning_zero.sharding.memory_format import MemoryFormat
from lightning_zero.storage import Memory, Rested
from lightning_zero.storage.rested import changing, nbytes_of, pieces
from lightning_zero.torch_private import tree_leaves, tree_map

State = dict[str, Any]


@dataclass(frozen=True)
class OwnedTensor:
    """Describes a tensor of a parameter's state that one rank of the shard group keeps.

    Attributes:
        number: position of the tensor among the leaves of the parameter's state.
        form: its shape and strides, which need not be the parameter's.
        dtype: dtype of its elements.
    """

    number: int
    form: MemoryFormat
    dtype: torch.dtype


class ParameterState(NamedTuple):
    """The state of one parameter, without the values of its tensors."""

    names: tuple[str, ...]  # names of the state that has one value per element and is kept in shards
    rest: State  # the other state: numbers, small tensors, and an OwnedTensor for each large tensor


class OptimizerState(ABC):
    """The state of one bucket's segments for one optimizer. A segment has no state before its first update."""

    @property
    @abstractmethod
    def flat(self) -> dict[str, Rested]:
        """The state with one value per element of this rank's shard, by name: 1-D, Ψ/S elements each."""

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtypes in which the state with one value per element is read, by name."""
        return {name: tensor.dtype for name, tensor in self.flat.items()}

    @abstractmethod
    def __contains__(self, segment: Segment) -> bool: ...

    @abstractmethod
    def describe(self, segment: Segment) -> ParameterState:
        """Describe the part of the state of a segment's parameter that this rank has."""

    @abstractmethod
    def put_slice(self, segment: Segment, state: State, dtype: torch.dtype, own_dtype: frozenset[str]) -> None:
        """Take over a segment's part of the ``state`` of a full parameter.

        Args:
            segment: a segment of the bucket.
            state: values by name; tensors have their full shapes.
            dtype: the dtype to which floating-point state is converted.
            own_dtype: names of the state that keeps its dtype.
        """

    @abstractmethod
    def clear(self) -> None:
        """Forget everything, as before the first update."""

    @property
    @abstractmethod
    def memory(self) -> Memory:
        """The memory in which tensors with several elements are when they are read."""

    @property
    @abstractmethod
    def resting_memory(self) -> Memory:
        """The memory in which tensors with several elements rest between updates."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of tensors with several elements."""

    @property
    def resident_nbytes(self) -> int:
        """Bytes of tensors with several elements that stay in :attr:`memory` wherever the others rest."""
        return 0


class ShardState(OptimizerState):
    """State of segments that may be parts of parameters.

    Per-element state (``exp_avg``, ...) is kept in one 1-D tensor per name, laid out as the shard, in the bucket's
    optimizer store. Scalar state (``step``, ...) is kept per segment.

    Args:
        bucket: the bucket.
        per_element: names of the state that has one value per element.
        dtype: dtype of all per-element state; ``None``: the one that the optimizer gives it.
    """

    def __init__(self, bucket: Bucket, per_element: frozenset[str], dtype: torch.dtype | None = None) -> None:
        self._store = bucket.placement.optimizer_store
        self._bucket = bucket.name
        self._numel = bucket.layout.shard_numel
        self._numels = bucket.layout.numels
        self._formats = bucket.formats
        self._per_element = per_element
        self._dtype = dtype
        self._flat: dict[str, Rested] = {}  # by name; 1-D, Ψ/S
        self._scalars: dict[Segment, State] = {}
        self._names: dict[Segment, tuple[str, ...]] = {}  # names of the per-element state that a segment has

    @property
    def flat(self) -> dict[str, Rested]:
        return self._flat

    def __contains__(self, segment: Segment) -> bool:
        return segment in self._scalars

    def describe(self, segment: Segment) -> ParameterState:
        # Readers, other ranks or a checkpoint's, need not have the device of fused, capturable or ASGD's scalars.
        scalars: State = {name: _on_host(value) for name, value in self.scalars(segment).items()}
        return ParameterState(self.names(segment), scalars)

    def key(self, segment: Segment) -> Hashable:
        """A key that is equal for segments that may be updated as one, as all but their per-element values is equal."""
        scalars = self._scalars.get(segment, {})
        return self.names(segment), tuple((name, _comparable(value)) for name, value in scalars.items())

    def get(self, run: Run) -> State:
        """The state of a run whose segments have one :meth:`key`, in the optimizer's format, as if they were one.

        Per-element state consists of views of the flat tensors. Scalars are copies, except for those of a run that is
        one whole segment.
        """
        return self.views(run, self.names(run.segments[0])) | self.own_scalars(run)

    def views(self, run: Run, names: Iterable[str]) -> State:
        """The per-element state called ``names``, as in :meth:`get`."""
        return {name: self.flat[name].view(run.start, run.stop) for name in names}

    def own_scalars(self, run: Run) -> State:
        """The scalar state, as in :meth:`get`; empty before the first update."""
        first = run.segments[0]
        if first not in self:
            return {}
        scalars = self._scalars[first]
        return scalars if run == Run.of(first) else _copies(scalars)

    def put(self, run: Run, state: State) -> None:
        """Take over the state after an update. Tensors that are views from :meth:`get` need not be copied."""
        names = tuple(name for name, value in state.items() if self._is_flat(name, value, run.numel))
        for name in names:
            view = self.ensure(name, state[name].dtype).view(run.start, run.stop)
            if view.data_ptr() != state[name].data_ptr():
                view.copy_(state[name].reshape(-1))
        scalars = {name: value for name, value in state.items() if name not in names}
        first, *others = run.segments
        self.put_scalars(first, scalars, names)
        for segment in others:  # each needs its own scalars, since the next update changes them in place
            # Names that are known keep their objects, because the bytes of a pickle depend on the identity of strings.
            known = {name: None for name in self._scalars.get(segment, ()) if name in scalars}
            same = self.names(segment) == names
            self.put_scalars(segment, known | _copies(scalars), self.names(segment) if same else names)

    def put_slice(self, segment: Segment, state: State, dtype: torch.dtype, own_dtype: frozenset[str]) -> None:
        names, scalars = [], {}
        for name, value in state.items():
            if self._is_flat(name, value, self._numels[segment.param]):
                converted = name in self._per_element - own_dtype and value.is_floating_point()
                self._fill(self.ensure(name, dtype if converted else value.dtype), segment, value)
                names.append(name)
            else:
                scalars[name] = value.detach().clone() if isinstance(value, Tensor) else value
        self.put_scalars(segment, scalars, tuple(names))

    def _fill(self, tensor: Rested, segment: Segment, full: Tensor) -> None:
        for low, high in pieces(tensor.tile, segment.start, segment.stop):
            with changing(tensor, low, high) as into:
                self._formats[segment.param].read(full, segment.param_start + low - segment.start, into)

    def read(self, name: str, dtype: torch.dtype, start: int, stop: int) -> Tensor:
        """Elements ``[start, stop)`` of the flat tensor called ``name``, 1-D; zeros of ``dtype`` if there is none."""
        if name in self.flat:
            return self.flat[name].read(start, stop)
        return torch.zeros(stop - start, dtype=self._dtype or dtype, device=self._store.device)

    def ensure(self, name: str, dtype: torch.dtype) -> Rested:
        """The flat tensor called ``name``, which may be written to; it is made on first use."""
        if name not in self.flat:
            self.flat[name] = self._store.rest(self._numel, self._dtype or dtype, f"{name} of {self._bucket}")
        return self.flat[name]

    def parts(self, name: str, dtype: torch.dtype, run: Run) -> Tensor | Quantized:
        """The elements of a run, which a kernel may update in place; they are made on first use."""
        return self.ensure(name, dtype).view(run.start, run.stop)

    def expect(self, start: int, stop: int, names: Iterable[str]) -> None:
        """Begin to fetch per-element state that an update of ``[start, stop)`` needs."""
        for name in names:
            if name in self.flat:
                self.flat[name].expect(start, stop)

    def commit(self, start: int, stop: int) -> None:
        """Begin to put back the per-element state that an update of ``[start, stop)`` has changed."""
        for tensor in self.flat.values():
            tensor.commit(start, stop)

    def scalars(self, segment: Segment) -> State:
        """The scalar state of a segment."""
        return self._scalars[segment]

    def names(self, segment: Segment) -> tuple[str, ...]:
        """The names of the per-element state that a segment has."""
        return self._names.get(segment, ())

    def put_scalars(self, segment: Segment, scalars: State, names: tuple[str, ...]) -> None:
        """Set the scalar state of a segment whose per-element state, called ``names``, was updated in place."""
        self._scalars[segment] = scalars
        self._names[segment] = names

    def clear(self) -> None:
        self._flat, self._scalars, self._names = {}, {}, {}

    @property
    def memory(self) -> Memory:
        """The memory of the tensors that :meth:`read` returns."""
        return self._store.memory

    @property
    def resting_memory(self) -> Memory:
        return self._store.resting_memory

    @property
    def nbytes(self) -> int:
        """Bytes of per-element state in the memory where it rests."""
        return sum(map(nbytes_of, self.flat.values()))

    def _is_flat(self, name: str, value: Any, numel: int) -> bool:
        # The names are known from a trial. A group that is added later may keep more state than the trial found.
        return isinstance(value, Tensor) and (name in self._per_element or value.numel() == numel > 1)


@dataclass(frozen=True, eq=False)
class _Resting:
    """A tensor of a parameter's state that rests outside of the memory in which it is computed.

    Attributes:
        values: the elements, 1-D, in the memory order of ``form``.
        form: shape and strides of the tensor.
    """

    values: Rested
    form: MemoryFormat

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def address(self) -> int | None:
        """The address of the memory to which the tensor was fetched; ``None`` if it is not fetched."""
        return _address(self.values.view(0, 1)) if self.values.holds(0, self.values.numel) else None

    def fits(self, tensor: Tensor) -> bool:
        """Whether its form and dtype are those of ``tensor``."""
        return (self.form, self.dtype) == (MemoryFormat.of(tensor), tensor.dtype)


class WholeState(OptimizerState):
    """State of parameters that are each whole in one shard, in the form in which the optimizer itself keeps it.

    If the bucket's store has tiles, each tensor with several elements rests there between updates. An update fetches
    the tensors of a few parameters before (:meth:`expect`), and puts them back afterwards (:meth:`commit`).

    Attributes:
        bucket: the name of the bucket.
        formats: the memory formats of the bucket's parameters.

    Args:
        bucket: a bucket whose layout keeps parameters whole.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._store = bucket.placement.optimizer_store
        self.bucket = bucket.name
        self.formats = bucket.formats
        self._states: dict[int, State] = {}  # by index of the parameter

    @property
    def flat(self) -> dict[str, Rested]:
        return {}

    def __contains__(self, segment: Segment) -> bool:
        return segment.param in self._states

    def get(self, segment: Segment) -> State:
        """The state of a segment's parameter, for an update to change in place; empty before the first update."""
        state = self._states.get(segment.param, {})
        if self._store.tile is None:
            return state
        loaded: dict[int, Tensor] = {}  # so that a tensor with two names stays one tensor

        def load(leaf: Any) -> Any:
            if not isinstance(leaf, _Resting):
                return leaf
            if id(leaf) not in loaded:
                loaded[id(leaf)] = leaf.form.view(leaf.values.read(0, leaf.values.numel))
            return loaded[id(leaf)]

        loaded_state: State = tree_map(load, state)
        return loaded_state

    def resting(self, segments: Iterable[Segment]) -> list[Rested]:
        """The tensors of these segments' state that rest outside of the memory in which they are computed."""
        leaves = tree_leaves([self._states.get(segment.param, {}) for segment in segments])
        return [leaf.values for leaf in leaves if isinstance(leaf, _Resting)]

    def expect(self, segments: Iterable[Segment]) -> None:
        """Begin to fetch the state of these segments, for :meth:`get`. It is kept in memory until :meth:`commit`."""
        for values in self.resting(segments):
            values.expect(0, values.numel)

    def commit(self, segments: Iterable[Segment]) -> list[Rested]:
        """Begin to put back the state of these segments.

        Returns:
            The tensors that are put back; :meth:`Rested.settle` of each waits until it is done.
        """
        kept = self.resting(segments)
        for values in kept:
            values.commit(0, values.numel)
        return kept

    def put(self, segment: Segment, state: State) -> None:
        """Set the state after an update, in place of that from :meth:`get`."""
        self._states[segment.param] = state if self._store.tile is None else self._rested(segment.param, state)

    def _rested(self, param: int, state: State) -> State:
        """Move the large tensors of ``state`` to the store.

        Each is stored in place of the tensor that was at its position in the state before, if form and dtype are equal.
        """
        before, number, rested = tree_leaves(self._states.get(param, {})), itertools.count(), dict[int, _Resting]()
        # Optimizers may exchange tensors of their state. Therefore a resting tensor whose fetched memory is still used
        # anywhere in the new state must not be overwritten by another tensor.
        shown = {known.address: known for known in before if isinstance(known, _Resting) and known.address}
        in_use = {_address(leaf) for leaf in tree_leaves(state) if _is_large(leaf)} & shown.keys()

        def place(own: int, leaf: Tensor) -> _Resting | None:
            if (itself := shown.get(_address(leaf))) is not None:
                return itself
            known = before[own] if own < len(before) else None
            return known if isinstance(known, _Resting) and known.address not in in_use else None

        def rest(leaf: Any) -> Any:
            own = next(number)
            if not _is_large(leaf):
                return leaf
            if id(leaf) not in rested:
                known = place(own, leaf)
                if known is None or not known.fits(leaf) or known in rested.values():
                    what = f"state of parameter {param} of {self.bucket}"
                    values = self._store.rest(leaf.numel(), leaf.dtype, what, apart=True)
                    known = _Resting(values, MemoryFormat.of(leaf))
                flat = known.form.flatten(leaf.detach())
                with changing(known.values, 0, flat.numel(), overwritten=True) as into:
                    if into.data_ptr() != flat.data_ptr():
                        into.copy_(flat)
                rested[id(leaf)] = known
            return rested[id(leaf)]

        resting: State = tree_map(rest, state)
        return resting

    def describe(self, segment: Segment) -> ParameterState:
        number = itertools.count()

        def described(leaf: Any) -> Any:
            own = next(number)
            if isinstance(leaf, _Resting):
                return OwnedTensor(own, leaf.form, leaf.dtype)
            if _is_large(leaf):
                return OwnedTensor(own, MemoryFormat.of(leaf), leaf.dtype)
            return _on_host(leaf.detach()) if isinstance(leaf, Tensor) else leaf  # readers need not have the device

        return ParameterState((), tree_map(described, self._states[segment.param]))

    def read_owned(self, param: int, tensor: OwnedTensor, start: int, stop: int | None) -> Tensor:
        """Elements of a tensor of a parameter's state: 1-D, in the order of its memory.

        Args:
            param: index of the parameter.
            tensor: the tensor.
            start: first element.
            stop: the one after the last; ``None``: all up to the last.
        """
        leaf = tree_leaves(self._states[param])[tensor.number]
        if isinstance(leaf, _Resting):
            return leaf.values.read(start, leaf.values.numel if stop is None else stop)
        assert isinstance(leaf, Tensor)
        return tensor.form.flatten(leaf)[start:stop]

    def put_slice(self, segment: Segment, state: State, dtype: torch.dtype, own_dtype: frozenset[str]) -> None:
        def taken(leaf: Any, kind: torch.dtype | None) -> Any:
            if not isinstance(leaf, Tensor):
                return copy.deepcopy(leaf)
            if leaf.dim() == 0 or leaf.numel() == 0:  # counters stay where optimizers keep them
                return leaf.detach().clone()
            # The form is taken from a meta tensor, because the values of the tensor itself may still be in a file.
            form = MemoryFormat.of(torch.empty_strided(leaf.shape, leaf.stride(), device="meta"))
            kind = kind if kind is not None and leaf.is_floating_point() else leaf.dtype
            values = torch.empty(leaf.numel(), dtype=kind, device=self._store.device)
            form.read(leaf, 0, values)
            return form.view(values)

        self.put(
            segment,
            {
                name: tree_map(partial(taken, kind=None if name in own_dtype else dtype), value)
                for name, value in state.items()
            },
        )

    def clear(self) -> None:
        self._states = {}

    @property
    def memory(self) -> Memory:
        return self._store.memory

    @property
    def resting_memory(self) -> Memory:
        return self._store.resting_memory

    @property
    def nbytes(self) -> int:
        leaves = tree_leaves(self._states)
        resting = sum(nbytes_of(leaf.values) for leaf in leaves if isinstance(leaf, _Resting))
        return resting + sum(leaf.nbytes for leaf in leaves if _is_large(leaf))


def _address(tensor: Tensor) -> int:
    """The address of the memory in which a tensor is."""
    return tensor.untyped_storage().data_ptr()


def _is_large(leaf: Any) -> TypeGuard[Tensor]:
    """Whether a part of the state is too large to be passed between ranks in the description of the state."""
    return isinstance(leaf, Tensor) and leaf.numel() > 1


def _on_host(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) and value.device.type != "cpu" else value


def _copies(scalars: State) -> State:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in scalars.items()}


def _comparable(value: Any) -> Hashable:
    return (value.dtype, tuple(value.flatten().tolist())) if isinstance(value, Tensor) else value
