"""Wraps torch's private names, each with the reason why no public name can be used.

This is the only file that uses them; ``tests/test_private_names.py`` fails if another file does, or if an upgrade of
torch has removed one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch import __future__ as future
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.autograd.graph import Node
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.distributed_c10d import _get_default_store
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.storage import TypedStorage, UntypedStorage
from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map

__all__ = [
    "CLEAN_STEPS",
    "DEPENDS_ON_VALUES",
    "FLASH_ATTENTION",
    "FOREACH",
    "GLOO_THREAD",
    "OPTIMIZER_HOOKS",
    "ORIGINAL",
    "PRIVATE_METADATA",
    "READS_NUMBER",
    "SCHEDULE_OF_ONE_CYCLE",
    "TO_COPY",
    "FakeTensor",
    "FakeTensorMode",
    "StorageInfo",
    "TorchDispatchMode",
    "autograd_number",
    "base_of",
    "bytes_of_storages",
    "compiled_call",
    "copy_each",
    "file_offset",
    "foreach_devices",
    "gradient_hooks",
    "has_own_apply",
    "has_post_step_hooks",
    "has_pre_step_hooks",
    "inside_backward",
    "is_traceable_wrapper_subclass",
    "load_hooks",
    "make_parameter",
    "make_wrapper",
    "mark_for_schedulers",
    "move_other_state",
    "no_subclass_functions",
    "no_torch_function",
    "no_torch_functions",
    "norms_of_each",
    "note_step",
    "pass_versions",
    "pickled_parameter",
    "pickled_tensor",
    "profiles",
    "registered_modules",
    "set_compiled_call",
    "shift_versions",
    "storage_in",
    "storage_number",
    "tree_leaves",
    "tree_map",
    "users_of_storage",
    "users_of_tensor",
    "version_counter",
    "version_of",
]

T = TypeVar("T", bound=Tensor)

# ------------------------------------------------------------------------------------------------- values and functions

# `tree_leaves` and `tree_map` traverse the named tuples, dictionaries and registered classes in the arguments of
# torch's functions; `is_traceable_wrapper_subclass` recognizes tensors that consist of others (DTensor, quantized
# weights); a `TorchDispatchMode` intercepts every operator that runs. None of the four has a public counterpart.

# Inside a `FakeTensorMode` tensors are of the class `FakeTensor`, which has shapes but no memory, and operators choose
# the implementation for the tensors' device (unlike on "meta"). These errors mean that a shape depends on values, which
# do not exist.
DEPENDS_ON_VALUES = (DataDependentOutputException, DynamicOutputShapeException)

# The name that torch gives the threads that run gloo's collectives. There is no other way to see them.
GLOO_THREAD = "pt_gloo_runloop"

# Flash attention on a CPU and its backward, which torch's counter of operations does not know.
FLASH_ATTENTION = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward,
)

# Contexts in which no subclass's `__torch_function__` is called; in the second, no function mode either. torch's notes
# on extending it use these names.
no_subclass_functions = torch._C.DisableTorchFunctionSubclass
no_torch_functions = torch._C.DisableTorchFunction

# The `__torch_function__` of subclasses such as `Parameter`, whose operations return ordinary tensors.
no_torch_function = torch._C._disabled_torch_function_impl


def copy_each(targets: list[Tensor], sources: list[Tensor]) -> None:
    """``target.copy_(source)`` for all pairs, in one kernel on a GPU; public functions copy only one tensor."""
    torch._foreach_copy_(targets, sources)


def norms_of_each(tensors: list[Tensor]) -> list[Tensor]:
    """The norms of all tensors, 0-dim float64, in one kernel on a GPU; public functions take only one tensor."""
    return list(torch._foreach_norm(tensors, 2, torch.float64))


# The operator that reads a number from a tensor (`item()`, `float(tensor)`, `if tensor:`); it has no public name.
READS_NUMBER = torch.ops.aten._local_scalar_dense.default

# The operator by which `to` converts and copies a tensor, and the beginning of the names of the operators that act on
# each tensor of a list. A `__torch_dispatch__` sees them by name.
TO_COPY: str = torch.ops.aten._to_copy.__name__
FOREACH = "_foreach_"

# Attributes and methods of a tensor that need only its metadata; a `__torch_function__` sees them by name.
PRIVATE_METADATA = frozenset(
    ("_grad", "_version", "_backward_hooks", "_post_accumulate_grad_hooks", "_base", "_is_view")
)


def changes_arguments(operator: Any) -> bool:
    """Whether an operator writes to one of its arguments; there is no public tag for this."""
    mutable: bool = operator._schema.is_mutable
    return mutable


def version_of(tensor: Tensor) -> int:
    """The version counter: how often a tensor was changed in place. ``torch.autograd.graph`` can only increment it."""
    return tensor._version


def shift_versions(tensors: Iterable[Tensor], by: int) -> None:
    """Adds to the version counters of tensors; see :func:`version_of`. FSDP2 keeps those of its parameters so."""
    found = tuple(tensors)
    torch._C._autograd._unsafe_set_version_counter(found, tuple(tensor._version + by for tensor in found))


def version_counter(tensor: Tensor) -> Tensor:
    """A tensor without memory whose :func:`version_of` is that of ``tensor``, now and later."""
    counter = tensor.detach()  # shares the version counter, which assigning `data` keeps
    counter.data = tensor.new_empty(0)
    return counter


def base_of(tensor: Tensor) -> Tensor:
    """The tensor that ``tensor`` is a view of, or ``tensor`` itself; no public name tells."""
    return tensor._base if tensor._is_view() and tensor._base is not None else tensor


def make_wrapper(cls: type[T], like: Tensor, device: torch.device) -> T:
    """A tensor of a subclass with shape, strides and dtype of ``like``, without memory.

    Only this constructor makes tensors that report being on a real device and have no memory there.
    """
    made: T = Tensor._make_wrapper_subclass(cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device)
    return made


def make_parameter(data: Tensor, requires_grad: bool) -> Parameter:
    """Make a parameter without calling ``Parameter.__new__``, which sharded initialization replaces."""
    made: Parameter = Tensor._make_subclass(Parameter, data, requires_grad)
    return made


def users_of_tensor(tensor: Tensor) -> int:
    """The number of C++ references to a tensor, such as those of an autograd graph; its Python object counts as one."""
    count: int = tensor._use_count()  # type: ignore[attr-defined]
    return count


def users_of_storage(storage: UntypedStorage) -> int:
    """The number of tensors and storage objects that share the memory of ``storage``, including itself."""
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count


def bytes_of_storages(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages of all tensors, each counted once; addresses do not distinguish storages on ``meta``."""
    with no_subclass_functions():
        return sum({s._cdata: s.nbytes() for s in (tensor.untyped_storage() for tensor in tensors)}.values())


def profiles() -> bool:
    """Whether a profiler of torch is running, so that ranges are worth their time; no public name tells."""
    return torch.autograd.profiler._is_profiler_enabled


# ------------------------------------------------------------------------------------------------------------- autograd


def autograd_number(node: Node) -> int:
    """The sequence number of a node; backward runs nodes in descending order of these numbers."""
    return node._sequence_nr()


def inside_backward() -> bool:
    """Whether the caller runs inside a backward, as a hook or function of autograd, in any of its threads."""
    return bool(torch._C._current_graph_task_id() != -1)


def gradient_hooks(parameter: Parameter) -> dict[int, Any]:
    """The hooks of ``register_post_accumulate_grad_hook`` by number; callers may change their order."""
    hooks: dict[int, Any] = parameter._post_accumulate_grad_hooks
    return hooks


# -------------------------------------------------------------------------------------------------------------- modules

ORIGINAL = "_orig_mod"  # name of the child under which the wrapper of `torch.compile` holds the module


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """The function that runs the graph of a module compiled by ``module.compile()``; ``None`` if it was not."""
    call: Callable[..., Any] | None = module._compiled_call_impl
    return call


def set_compiled_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Replace :func:`compiled_call`; hooks registered on the module would run inside the graph."""
    module._compiled_call_impl = call


def registered_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """The children of a module by name: the dictionary itself, which is several times as fast as ``children()``."""
    return module._modules


def has_own_apply(module: nn.Module) -> bool:
    """Whether a module's class overrides ``_apply``, as metrics do to move state that is no parameter or buffer.

    Recurrent layers override it to lay their weights out anew.
    """
    return type(module)._apply not in (nn.Module._apply, nn.RNNBase._apply)


def move_other_state(module: nn.Module, device: torch.device) -> None:
    """Let a module that has an ``_apply`` of its own move its state to ``device``, but no parameter and no buffer."""
    held = [*module.buffers(), *(t for p in module.parameters() for t in (p, p.grad) if t is not None)]
    own = {id(tensor) for tensor in held}
    overwrites, swaps = (
        future.get_overwrite_module_params_on_conversion(),
        future.get_swap_module_params_on_conversion(),
    )
    # Otherwise it would make new parameters of those that it leaves where they are.
    future.set_overwrite_module_params_on_conversion(False)
    future.set_swap_module_params_on_conversion(False)
    try:
        with no_subclass_functions():  # nothing reads the values of a parameter that is in shards
            type(module)._apply(module, lambda tensor: tensor if id(tensor) in own else tensor.to(device))
    finally:
        future.set_overwrite_module_params_on_conversion(overwrites)
        future.set_swap_module_params_on_conversion(swaps)


def load_hooks(module: nn.Module) -> Iterable[Callable[..., None]]:
    """Hooks that rename keys before a module loads; public functions register them, but none runs them."""
    return module._load_state_dict_pre_hooks.values()


def pass_versions(source: Mapping[str, Any], target: OrderedDict[str, Any], rename: Callable[[str], str]) -> None:
    """Give one state dict the versions of modules that another one has, if any, with the modules' names changed.

    ``state_dict()`` notes them in this attribute, from which ``load_state_dict`` reads them; no public name does.
    """
    if (versions := getattr(source, "_metadata", None)) is not None:
        target._metadata = {rename(name): value for name, value in versions.items()}  # type: ignore[attr-defined]


# ----------------------------------------------------------------------------------------------------------- optimizers

# The attributes with an optimizer's hooks: a copy of the optimizer needs the attributes but not the hooks.
OPTIMIZER_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)

# The key of a gradient scaler's `state_dict` with the number of steps since the scale was changed last.
CLEAN_STEPS = "_growth_tracker"

# Attributes of OneCycleLR that its constructor derives from its arguments.
SCHEDULE_OF_ONE_CYCLE = ("_schedule_phases", "_anneal_func_type")


def foreach_devices() -> frozenset[str]:
    """The device types on which torch's optimizers use their ``foreach`` implementation by default.

    It may round differently from the implementation for single tensors, and no public name tells which one is used.
    The meta device is included, since it represents an accelerator in plans.
    """
    return frozenset([*_get_foreach_kernels_supported_devices(), "meta"])


def has_post_step_hooks(optimizer: Optimizer) -> bool:
    """Whether the optimizer has post-step hooks of user code; public functions register them, but none lists them."""
    return bool(optimizer._optimizer_step_post_hooks or _global_optimizer_post_hooks)


def has_pre_step_hooks(optimizer: Optimizer) -> bool:
    """Whether the optimizer has pre-step hooks of user code."""
    return bool(optimizer._optimizer_step_pre_hooks or _global_optimizer_pre_hooks)


def note_step(optimizer: Optimizer) -> None:
    """Tell schedulers that the optimizer has stepped, as torch's own ``step`` does; otherwise they warn."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def mark_for_schedulers(step: Callable[..., Any]) -> None:
    """Mark a ``step`` that calls :func:`note_step`; schedulers warn about a replaced method without the mark."""
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]


# --------------------------------------------------------------------------------------------- storages and their files

StorageInfo = _StorageInfo  # the position of a tensor in the `.metadata` of torch.distributed.checkpoint


def pickled_tensor(storage: UntypedStorage, like: Tensor) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    """The result of :meth:`torch.Tensor.__reduce_ex__` for an ordinary tensor on the CPU that fills ``storage``.

    ``storage`` is on the meta device, but ``torch.load`` must put it on the CPU; only this attribute achieves that.
    """
    typed = TypedStorage(wrap_storage=storage, dtype=like.dtype, _internal=True)
    typed._fake_device = torch.device("cpu")
    return torch._utils._rebuild_tensor_v2, (typed, 0, like.size(), like.stride(), False, OrderedDict())


def pickled_parameter(
    values: Tensor, requires_grad: bool, attributes: dict[str, Any]
) -> tuple[Callable[..., Parameter], tuple[Any, ...]]:
    """The result of ``Parameter.__reduce_ex__`` for a parameter with ``values`` and attributes of user code."""
    if not attributes:
        return torch._utils._rebuild_parameter, (values, requires_grad, OrderedDict())
    return torch._utils._rebuild_parameter_with_state, (values, requires_grad, OrderedDict(), attributes)


def storage_in(obj: Any) -> UntypedStorage | None:
    """The untyped storage of ``obj`` if that is a storage, typed or not; otherwise ``None``."""
    storage = obj._untyped_storage if isinstance(obj, TypedStorage) else obj
    return storage if isinstance(storage, UntypedStorage) else None


def storage_number(storage: UntypedStorage) -> int:
    """A number that is the same for all Python objects of one storage, unlike the address also without memory."""
    number: int = storage._cdata
    return number


def file_offset(storage: UntypedStorage) -> int | None:
    """The offset in its file of a storage that ``torch.load`` made on the meta device; ``None`` if torch is too old."""
    return getattr(storage, "_checkpoint_offset", None)


def default_store() -> Store:
    """The key-value store of the default process group."""
    return _get_default_store()
