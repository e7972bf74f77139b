"""Initializes a model without ever holding all of it: a parameter is sharded as soon as its module is complete.

Inside :func:`sharded_init` a parameter is in one of two states:

    unsharded   an ordinary parameter: those of the module under construction, or of the operation that runs
    sharded     a :class:`ShardedParameter`, with its shape and dtype but a storage of zero bytes, and a
                :class:`ParameterShard` (1-D, ceil(n/S) elements) in a store

A new parameter is unsharded. It is sharded when the construction of the next module begins. Any operation on a sharded
parameter (``nn.init.normal_``, indexing, ``.data``) gathers it first, and it stays unsharded until another one is used.
So constructors run unchanged, in the same order and with the same random numbers as without sharding.

Construction on the meta device, with an initialization module by module later, cannot give these values: they are what
the constructors draw, in their order, and constructors may compute with them (scale, copy, orthogonalize). torch has a
hook for the registration of a parameter, but none for its creation, for its copies and for the beginning of a module's
construction. Therefore ``Parameter.__new__``, ``Parameter.__deepcopy__`` and ``nn.Module.__init__`` are replaced.

All of this is collective: every rank must run the same code. Rank 0's values are used on all ranks.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.nn import Parameter
from torch.nn.modules.module import register_module_parameter_registration_hook

from lightning_zero.advice import Case, advice
from lightning_zero.sharding.freed import FreedParameter, function_name, is_metadata, mark, own_class, unmark
from lightning_zero.sharding.memory_format import MemoryFormat, ReadableInSlices
from lightning_zero.sharding.mesh import Mesh
from lightning_zero.storage import TensorStore, device_type, note_freed
from lightning_zero.torch_private import (
    make_parameter,
    no_subclass_functions,
    no_torch_functions,
    tree_leaves,
    users_of_storage,
    users_of_tensor,
)

# Functions that overwrite a whole parameter, as initialization does; all ranks are expected to call them alike.
_FILLS = frozenset(("normal_", "uniform_", "constant_", "fill_", "zero_"))
_PATIENCE = 1.0  # seconds to wait for gloo; if it takes longer, the parameter only stays unsharded for longer
_SMALL = 1 << 16  # bytes; smaller shards do not get a memory mapping of their own in a host store


@dataclass(frozen=True)
class ParameterShard:
    """The part of a sharded parameter that a rank holds.

    Attributes:
        mesh: the parameter is sharded over its shard group.
        store: the store of the values.
        values: 1-D, ceil(n/S) elements in the order of the parameter's memory; the last shard may end with padding.
    """

    mesh: Mesh
    store: TensorStore
    values: Tensor


class ShardedParameter(FreedParameter):
    """A parameter of which this rank holds a shard.

    Inside :func:`sharded_init` any operation unshards it. Outside, only functions that fill it with other values are
    allowed; they unshard it while they run.
    """

    _zero_shard: ParameterShard

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if is_metadata(func):
            with no_subclass_functions():
                return func(*args, **(kwargs or {}))
        used = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Parameter)]
        target: Any = args[0] if args else (kwargs or {}).get("tensor")
        if _ACTIVE.get() is None and function_name(func) in _FILLS and [*map(id, used)] == [id(target)]:
            with sharded_init(target._zero_shard.mesh, target.device, target._zero_shard.store):
                func(*args, **(kwargs or {}))
            return target
        _active_for(function_name(func), used).use(used)
        return func(*args, **(kwargs or {}))  # the parameters are ordinary ones now

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        if id(self) in memo:
            known: Parameter = memo[id(self)]
            return known
        if own_class(type(self)) is not Parameter:
            _active_for("deepcopy", [self]).use([self])  # the user's subclass of Parameter defines how to copy
            full_copy: Parameter = self.__deepcopy__(memo)
            return full_copy
        copy = memo[id(self)] = _copy_of_shard(self)
        return copy


def _active_for(action: str, parameters: Iterable[Parameter]) -> ShardedInit:
    """The open :func:`sharded_init` context, for ``action`` on ``parameters``.

    Raises:
        RuntimeError: no context is open.
    """
    context = _ACTIVE.get()
    if context is None:
        names = ", ".join(repr(p) for p in parameters if isinstance(p, ShardedParameter))
        raise RuntimeError(
            f"{action} on {names}: it was initialized in shards, and no engine runs it yet"
            f"{advice(Case.INITIALIZED_IN_SHARDS, '. ')}"
        )
    return context


# --------------------------------------------------------------------------------------------------- one parameter


def full_values(parameter: Parameter) -> Tensor:
    """Unshard a parameter if it is sharded, and return its values, of its shape. Collective if it is sharded."""
    if isinstance(parameter, ShardedParameter):
        _unshard(parameter)
    return parameter.detach()


@torch.no_grad()
def _unshard(parameter: ShardedParameter) -> str:
    """Gather a parameter and return its name. Collective."""
    with no_torch_functions():
        shard: ParameterShard = parameter.__dict__.pop("_zero_shard")
        name: str = parameter.__dict__.pop("_zero_name")
        group, piece = shard.mesh.shard, shard.values
        parameter.untyped_storage().resize_(piece.nbytes * group.size)
        flat = _flat(parameter, piece.numel() * group.size)
        flat[group.rank * piece.numel() :][: piece.numel()].copy_(piece)
        group.all_gather_(flat, f"gather {name}")
        del flat
        unmark(parameter)
        _await_backend(parameter)
        return name


def _await_backend(parameter: Parameter) -> None:
    """Wait until gloo's thread has released the gathered tensor, which would look like an alias in user code."""
    deadline = time.monotonic() + _PATIENCE
    while not _is_unshared(parameter) and time.monotonic() < deadline:
        time.sleep(1e-5)


def _shard(parameter: Parameter, name: str, mesh: Mesh, store: TensorStore) -> None:
    """Broadcast rank 0's values of a parameter, keep this rank's shard and free the rest. Collective."""
    group = mesh.shard
    length = -(-parameter.numel() // group.size)
    _own_storage(parameter, length * group.size)
    flat = mesh.world.broadcast_(_flat(parameter, parameter.numel()), f"broadcast the initial {name}")
    values = _zeros(store, length, parameter.dtype)
    own = flat[group.rank * length :][:length]
    values[: own.numel()].copy_(own)
    del flat, own
    parameter.untyped_storage().resize_(0)
    note_freed(parameter, parameter.nbytes)
    _mark_sharded(parameter, name, ParameterShard(mesh, store, values))


def _mark_sharded(parameter: Parameter, name: str, shard: ParameterShard) -> None:
    parameter._zero_shard = shard  # type: ignore[attr-defined]
    parameter._zero_name = name  # type: ignore[attr-defined]
    mark(parameter, ShardedParameter)


def _own_storage(parameter: Parameter, max_numel: int) -> None:
    """Give the parameter a resizable storage with nothing but its elements, unless it has one."""
    storage = parameter.untyped_storage()
    dense = torch.empty_like(parameter, device="meta").stride() == parameter.stride()
    alone = parameter.storage_offset() == 0 and storage.nbytes() <= max_numel * parameter.itemsize
    if not (dense and alone and storage.resizable()):
        parameter.data = parameter.data.clone()


def _flat(parameter: Tensor, numel: int) -> Tensor:
    """The first ``numel`` elements of the parameter's storage, 1-D."""
    storage = parameter.untyped_storage()
    return torch.empty(0, dtype=parameter.dtype, device=parameter.device).set_(storage, 0, (numel,), (1,))


def _zeros(store: TensorStore, numel: int, dtype: torch.dtype) -> Tensor:
    small = store.exact and numel * dtype.itemsize < _SMALL
    return torch.zeros(numel, dtype=dtype, device=store.device) if small else store.zeros(numel, dtype)


@torch.no_grad()
def _copy_of_shard(parameter: ShardedParameter) -> Parameter:
    with no_torch_functions():
        shard = parameter._zero_shard
        form = MemoryFormat(parameter.shape, parameter.stride())
        data = _without_memory(form, parameter.dtype, parameter.device)
        copy: Parameter = make_parameter(data, parameter.requires_grad)
        values = _zeros(shard.store, shard.values.numel(), shard.values.dtype).copy_(shard.values)
        _mark_sharded(copy, parameter._zero_name, ParameterShard(shard.mesh, shard.store, values))
    return copy


def _without_memory(form: MemoryFormat, dtype: torch.dtype, device: torch.device) -> Tensor:
    data = torch.empty_strided(form.shape, form.strides, dtype=dtype, device=device)
    data.untyped_storage().resize_(0)
    return data


def _is_shardable(parameter: Parameter, device: torch.device) -> bool:
    plain = Parameter in type(parameter).__mro__ and not isinstance(parameter, nn.parameter.UninitializedParameter)
    strided = parameter.layout is torch.strided and not parameter.is_quantized
    return plain and strided and parameter.device == device and parameter.numel() > 0


def _is_unshared(parameter: Parameter) -> bool:
    """Whether nothing but the parameter itself refers to its memory: no view, no alias, no autograd graph."""
    storage = parameter.untyped_storage()
    # The storage is used by the tensor and by `storage`, the tensor by its Python object.
    return users_of_storage(storage) == 2 and users_of_tensor(parameter) == 1


# ----------------------------------------------------------------------------------------------------- the context


@dataclass
class _Unsharded:
    """A parameter that is unsharded inside the context, and the last module, if any, in which it was registered."""

    parameter: Parameter
    name: str
    owner: int | None = None  # id of the module


def _is_dropped(entry: _Unsharded) -> bool:
    """Whether nothing but the entry refers to the parameter."""
    return sys.getrefcount(entry.parameter) == 2  # the entry, and the argument of this call


class ShardedInit:
    """Shards the parameters of a model under construction; :func:`sharded_init` yields it.

    Attributes:
        device: device of the parameters that are sharded.
        unsharded_bytes: bytes of the parameters that are unsharded now.
        peak_bytes: maximum of ``unsharded_bytes`` so far.
    """

    def __init__(self, mesh: Mesh, device: torch.device, store: TensorStore) -> None:
        self.peak_bytes = 0
        self._mesh = mesh
        self.device = torch.empty(0, dtype=torch.uint8, device=device).device  # with its index, as tensors report it
        self._store = store
        # By id, in the same order on all ranks. References are strong, so that the garbage collector of one rank does
        # not influence the collectives.
        self._unsharded: dict[int, _Unsharded] = {}

    @property
    def unsharded_bytes(self) -> int:
        return sum(entry.parameter.nbytes for entry in self._unsharded.values())

    def created(self, parameter: Parameter) -> None:
        """Note that a parameter was constructed, and shard earlier ones that were not registered in any module.

        Their initialization is most likely complete.
        """
        self._add(parameter)
        self._shard([entry for key, entry in self._unsharded.items() if entry.owner is None and key != id(parameter)])

    def reads(self, values: Tensor) -> bool:
        """Whether ``values`` are in a file, so that :meth:`read` can make a parameter from them."""
        strided = values.layout is torch.strided and values.numel() > 0
        return isinstance(values, ReadableInSlices) and values.device == self.device and strided

    @torch.no_grad()
    def read(self, values: Tensor, requires_grad: bool) -> Parameter:
        """Make a sharded parameter from values in a file; this rank reads only its part. Not collective."""
        group, form = self._mesh.shard, MemoryFormat(values.shape, values.stride())
        length = -(-form.shape.numel() // group.size)
        own, start = _zeros(self._store, length, values.dtype), group.rank * length
        if (numel := min(length, form.shape.numel() - start)) > 0:
            form.read(values, start, own[:numel])
        parameter = make_parameter(_without_memory(form, values.dtype, self.device), requires_grad)
        _mark_sharded(parameter, "(unnamed)", ParameterShard(self._mesh, self._store, own))
        return parameter

    def registered(self, module: nn.Module, name: str, parameter: Tensor) -> None:
        """Note that a parameter was assigned to a module, and shard those of other modules, which are complete."""
        name = f"{type(module).__name__}.{name}"
        if isinstance(parameter, ShardedParameter):
            parameter._zero_name = name
        elif isinstance(parameter, Parameter):
            self._add(parameter)
            if (entry := self._unsharded.get(id(parameter))) is not None:
                entry.name, entry.owner = name, id(module)
            self._shard([e for e in self._unsharded.values() if e.owner != id(module)])

    def use(self, parameters: Iterable[Parameter]) -> None:
        """Unshard ``parameters`` for an operation, and shard all others. Collective."""
        used = {id(p): p for p in parameters}
        self._shard([entry for key, entry in self._unsharded.items() if key not in used])
        for parameter in used.values():
            if isinstance(parameter, ShardedParameter):
                self._add(parameter, _unshard(parameter))

    def settle(self) -> None:
        """Shard all unsharded parameters, except those of which user code holds an alias. Collective."""
        self._shard(list(self._unsharded.values()))

    def _add(self, parameter: Parameter, name: str = "(unnamed)") -> None:
        if id(parameter) not in self._unsharded and _is_shardable(parameter, self.device):
            self._unsharded[id(parameter)] = _Unsharded(parameter, name)
            self.peak_bytes = max(self.peak_bytes, self.unsharded_bytes)

    @torch.no_grad()
    def _shard(self, entries: Sequence[_Unsharded]) -> None:
        with no_torch_functions():
            for entry in entries:
                if not _is_shardable(entry.parameter, self.device):  # moved to another device, for example
                    del self._unsharded[id(entry.parameter)]
            entries = [entry for entry in entries if id(entry.parameter) in self._unsharded]
            if not entries:
                return
            unshared, dropped = self._everywhere(
                [[_is_unshared(e.parameter) for e in entries], [_is_dropped(e) for e in entries]]
            )
            kept = []
            for entry, is_unshared, is_dropped in zip(entries, unshared, dropped, strict=True):
                if is_dropped or is_unshared:
                    del self._unsharded[id(entry.parameter)]
                else:
                    kept.append(entry)
                if is_unshared and not is_dropped:
                    _shard(entry.parameter, entry.name, self._mesh, self._store)
        if any(dropped):
            del entry, entries
            self._shard(kept)  # dropped parameters may have shared memory with these

    def _everywhere(self, flags: list[list[bool]]) -> list[list[bool]]:
        """Returns for each flag whether it is set on all ranks. Collective.

        The ranks' own flags may differ, since a reference to a parameter may lie in garbage that only some ranks have
        collected.
        """
        world = self._mesh.world
        own = device_type(self.device).send(torch.tensor(flags, dtype=torch.bool, device="cpu"), self.device)
        votes = own.new_zeros(world.size, *own.shape)
        votes[world.rank] = own
        with world.explaining(what := "see who uses parameters"):
            world.all_gather_(votes.view(-1), what)
            answers: list[list[bool]] = votes.all(0).tolist()
        return answers


_ACTIVE: ContextVar[ShardedInit | None] = ContextVar("sharded_init", default=None)


@contextlib.contextmanager
def sharded_init(mesh: Mesh, device: torch.device, store: TensorStore) -> Iterator[ShardedInit]:
    """A context in which new parameters are sharded over ``mesh.shard``, module by module; see the module's docstring.

    Sharded parameters can be used inside this or a later such context, inside :func:`gathered_parameters`, and by an
    :class:`Engine`. Elsewhere they can only be filled with other values in place; any other use raises an error that
    names them. Parameters on another device stay unsharded, and so does a parameter while user code holds another
    reference to its memory. A context inside another one does nothing.

    Args:
        mesh: process groups.
        device: device of the parameters; the caller must make it the default device.
        store: store of the shards.

    Yields:
        The context, which counts the bytes of unsharded parameters.
    """
    if (active := _ACTIVE.get()) is not None:
        yield active
        return
    context = ShardedInit(mesh, device, store)
    with _hooks(context):
        token = _ACTIVE.set(context)
        try:
            yield context
            context.settle()
        finally:
            _ACTIVE.reset(token)


@contextlib.contextmanager
def _hooks(context: ShardedInit) -> Iterator[None]:
    """Notify ``context`` of each parameter that is created, copied or registered, and of each module's construction."""
    new_parameter, copy_parameter, begin_module = Parameter.__new__, Parameter.__deepcopy__, nn.Module.__init__

    def new(cls: type[Parameter], data: Tensor | None = None, requires_grad: bool = True) -> Parameter:
        if isinstance(data, ShardedParameter):
            context.use([data])
        if data is not None and own_class(cls) is Parameter and context.reads(data):
            return context.read(data, requires_grad)
        parameter = new_parameter(own_class(cls), data, requires_grad)
        context.created(parameter)
        return parameter

    def deepcopy(parameter: Parameter, memo: dict[int, Any]) -> Parameter:
        if type(parameter) is Parameter:
            context.settle()
        else:
            context.use([parameter])
        copy = ShardedParameter.__deepcopy__ if isinstance(parameter, ShardedParameter) else copy_parameter
        return copy(parameter, memo)  # type: ignore[arg-type]

    def begin(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        context.settle()
        begin_module(module, *args, **kwargs)

    with contextlib.ExitStack() as stack:
        stack.enter_context(_replaced(Parameter, "__new__", staticmethod(new)))
        stack.enter_context(_replaced(Parameter, "__deepcopy__", deepcopy))
        stack.enter_context(_replaced(nn.Module, "__init__", begin))
        handle = register_module_parameter_registration_hook(context.registered)
        stack.callback(handle.remove)
        yield


@contextlib.contextmanager
def _replaced(owner: type, name: str, value: Any) -> Iterator[None]:
    previous = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, previous)


# ------------------------------------------------------------------------------------------------- unsharded, elsewhere


def values_held(parameter: Tensor) -> Tensor:
    """The tensor that this rank holds of a parameter: its shard (1-D) if it is sharded, otherwise the parameter."""
    return parameter._zero_shard.values if isinstance(parameter, ShardedParameter) else parameter


def unshard_parameters(parameters: Iterable[Parameter]) -> None:
    """Turn sharded parameters into ordinary ones. Collective."""
    for parameter in parameters:
        full_values(parameter)


@torch.no_grad()
def load_shard(parameter: ShardedParameter, values: Tensor) -> None:
    """Overwrite a sharded parameter with full ``values`` of its shape, which all ranks must have and pass."""
    with no_torch_functions():
        shard = parameter._zero_shard
        form, numel = MemoryFormat.of(parameter), parameter.numel()
        increment_version(parameter)
    start = shard.mesh.shard.rank * shard.values.numel()
    if start < numel:
        form.read(values, start, shard.values[: numel - start])


def usable_inside(parameters: Iterable[Parameter]) -> contextlib.AbstractContextManager[Any]:
    """A context in which code may use ``parameters``; each is unsharded while it is used. Collective."""
    for parameter in parameters:
        if isinstance(parameter, ShardedParameter):
            shard: ParameterShard = parameter._zero_shard
            return sharded_init(shard.mesh, parameter.device, shard.store)
    return contextlib.nullcontext()


@contextlib.contextmanager
def unsharded_inside(parameters: Iterable[Parameter]) -> Iterator[None]:
    """A context in which sharded parameters are gathered; at its end rank 0's values are kept. Collective."""
    sharded = [(p, p._zero_shard) for p in parameters if isinstance(p, ShardedParameter)]
    contexts = [ShardedInit(shard.mesh, parameter.device, shard.store) for parameter, shard in sharded]
    for context, (parameter, _) in zip(contexts, sharded, strict=True):
        context.use([parameter])
    try:
        yield
    finally:
        for context in contexts:
            context.settle()
