"""Torch's private names, each behind one of ours, with the reason why no public name serves.

The only file that reaches into torch; ``tests/test_private_names.py`` fails where another does, and where an upgrade
has taken a name away.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
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
    "DEPENDS_ON_VALUES",
    "FLASH_ATTENTION",
    "OPTIMIZER_HOOKS",
    "ORIGINAL",
    "READS_NUMBER",
    "SCHEDULE_OF_ONE_CYCLE",
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
    "no_subclass_functions",
    "no_torch_function",
    "no_torch_functions",
    "norms_of_each",
    "note_step",
    "pickled_tensor",
    "profiles",
    "registered_modules",
    "set_compiled_call",
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

# `tree_leaves` and `tree_map` go through the named tuples, dictionaries and registered classes in the arguments of
# torch's functions; `is_traceable_wrapper_subclass` tells tensors that consist of others (DTensor, quantized weights);
# a `TorchDispatchMode` sees every operator that runs. None of the four has a public counterpart.

# Inside a `FakeTensorMode` tensors, of the class `FakeTensor`, have shapes and no memory, and operators choose what
# they would choose on the tensors' device ("meta" is none). These errors say that a shape depends on values, which are
# not there.
DEPENDS_ON_VALUES = (DataDependentOutputException, DynamicOutputShapeException)

# Flash attention on a CPU and its backward, of which torch's counter of operations knows nothing.
FLASH_ATTENTION = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward,
)

# Contexts inside which no subclass's `__torch_function__` is called, and no function mode either. Torch's own notes on
# extending it name them so.
no_subclass_functions = torch._C.DisableTorchFunctionSubclass
no_torch_functions = torch._C.DisableTorchFunction

# The `__torch_function__` of a subclass that has none, as `Parameter`'s: functions do not make their results its own.
no_torch_function = torch._C._disabled_torch_function_impl


def copy_each(targets: list[Tensor], sources: list[Tensor]) -> None:
    """``target.copy_(source)`` for all pairs, in one kernel on a GPU; public functions copy one by one."""
    torch._foreach_copy_(targets, sources)


def norms_of_each(tensors: list[Tensor]) -> list[Tensor]:
    """The norms of all tensors, 0-dim float64, in one kernel on a GPU; public functions take one by one."""
    return list(torch._foreach_norm(tensors, 2, torch.float64))


# The operator by which a number leaves a tensor: `item()`, `float(tensor)`, `if tensor:`. None has a public name.
READS_NUMBER = torch.ops.aten._local_scalar_dense.default


def changes_arguments(operator: Any) -> bool:
    """Whether an operator writes to one of its arguments; no tag tells."""
    mutable: bool = operator._schema.is_mutable
    return mutable


def version_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place: ``torch.autograd.graph`` can increment the count, not read it."""
    return tensor._version


def version_counter(tensor: Tensor) -> Tensor:
    """A tensor without memory whose :func:`version_of` is that of ``tensor``, now and later."""
    counter = tensor.detach()  # shares the count, which the assignment keeps
    counter.data = tensor.new_empty(0)
    return counter


def base_of(tensor: Tensor) -> Tensor:
    """The tensor that ``tensor`` is a view of, or itself; only these names tell."""
    return tensor._base if tensor._is_view() and tensor._base is not None else tensor


def make_wrapper(cls: type[T], like: Tensor, device: torch.device) -> T:
    """A tensor of a subclass with shape, strides and dtype of ``like`` and without memory.

    Only this constructor makes tensors that say they are on the CPU and have no memory there.
    """
    made: T = Tensor._make_wrapper_subclass(cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device)
    return made


def make_parameter(data: Tensor, requires_grad: bool) -> Parameter:
    """A parameter without a call of ``Parameter.__new__``, which sharded initialization watches."""
    made: Parameter = Tensor._make_subclass(Parameter, data, requires_grad)
    return made


def users_of_tensor(tensor: Tensor) -> int:
    """How many references C++ holds to a tensor, such as those of an autograd graph; its Python object is one."""
    count: int = tensor._use_count()  # type: ignore[attr-defined]
    return count


def users_of_storage(storage: UntypedStorage) -> int:
    """How many tensors and storage objects share the memory of ``storage``, itself included."""
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count


def bytes_of_storages(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory of all tensors, each storage once; the address would not tell storages on ``meta`` apart."""
    with no_subclass_functions():
        return sum({s._cdata: s.nbytes() for s in (tensor.untyped_storage() for tensor in tensors)}.values())


def profiles() -> bool:
    """Whether a profiler of torch's runs; no public name tells, and a range that nobody sees takes its time, too."""
    return torch.autograd.profiler._is_profiler_enabled


# ------------------------------------------------------------------------------------------------------------- autograd


def autograd_number(node: Node) -> int:
    """The order in which nodes were made, which is that of backward, reversed."""
    return node._sequence_nr()


def inside_backward() -> bool:
    """Whether the caller is a hook or a function that autograd runs, in any of its threads."""
    return bool(torch._C._current_graph_task_id() != -1)


def gradient_hooks(parameter: Parameter) -> dict[int, Any]:
    """The hooks of ``register_post_accumulate_grad_hook`` by number, in the order of their calls, which may change."""
    hooks: dict[int, Any] = parameter._post_accumulate_grad_hooks
    return hooks


# -------------------------------------------------------------------------------------------------------------- modules

ORIGINAL = "_orig_mod"  # the child under which the wrapper that `torch.compile` returns holds the module


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """The function that runs the graph of a module compiled in place by ``module.compile()``; ``None``: it was not."""
    call: Callable[..., Any] | None = module._compiled_call_impl
    return call


def set_compiled_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Replace it: hooks that are registered on the module run inside the graph, where none of ours may."""
    module._compiled_call_impl = call


def registered_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """The children of a module by name: the dictionary itself, which ``children()`` walks several times as slowly."""
    return module._modules


def has_own_apply(module: nn.Module) -> bool:
    """Whether the class of a module moves state that is neither parameter nor buffer, as metrics do."""
    return type(module)._apply is not nn.Module._apply


def load_hooks(module: nn.Module) -> Iterable[Callable[..., None]]:
    """Hooks that rename keys before a module loads; a public function registers them, none runs them."""
    return module._load_state_dict_pre_hooks.values()


# ----------------------------------------------------------------------------------------------------------- optimizers

# Where an optimizer keeps its hooks: another object with its rule needs the attributes, and none of the hooks.
OPTIMIZER_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)

# Attributes of OneCycleLR that its constructor derives from its arguments.
SCHEDULE_OF_ONE_CYCLE = ("_schedule_phases", "_anneal_func_type")


def foreach_devices() -> frozenset[str]:
    """The types of devices whose tensors torch's optimizers update several at a time, unless they are told otherwise.

    That form of a rule may round otherwise than the one for a single tensor. An optimizer says which one it takes
    nowhere else. The meta device is among them: it stands for an accelerator in plans.
    """
    return frozenset([*_get_foreach_kernels_supported_devices(), "meta"])


def has_post_step_hooks(optimizer: Optimizer) -> bool:
    """Whether user code runs after the optimizer's steps; public functions register such hooks, none lists them."""
    return bool(optimizer._optimizer_step_post_hooks or _global_optimizer_post_hooks)


def has_pre_step_hooks(optimizer: Optimizer) -> bool:
    """Whether user code runs before the optimizer's steps."""
    return bool(optimizer._optimizer_step_pre_hooks or _global_optimizer_pre_hooks)


def note_step(optimizer: Optimizer) -> None:
    """Tell schedulers that the optimizer has stepped, without which they warn; torch's own ``step`` sets it."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def mark_for_schedulers(step: Callable[..., Any]) -> None:
    """Mark a ``step`` that calls :func:`note_step`: schedulers warn of a replaced method that has no mark."""
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]


# --------------------------------------------------------------------------------------------- storages and their files

StorageInfo = _StorageInfo  # stands in the `.metadata` of torch.distributed.checkpoint for the place of every tensor


def pickled_tensor(storage: UntypedStorage, like: Tensor) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    """As :meth:`torch.Tensor.__reduce_ex__` of an ordinary tensor on the CPU that fills ``storage``.

    The storage is on the meta device, and ``torch.load`` is to put it on the CPU, which only this attribute says.
    """
    typed = TypedStorage(wrap_storage=storage, dtype=like.dtype, _internal=True)
    typed._fake_device = torch.device("cpu")
    return torch._utils._rebuild_tensor_v2, (typed, 0, like.size(), like.stride(), False, OrderedDict())


def storage_in(obj: Any) -> UntypedStorage | None:
    """The storage that the pickler meets in ``obj``, which may be a typed one; ``None``: it is something else."""
    storage = obj._untyped_storage if isinstance(obj, TypedStorage) else obj
    return storage if isinstance(storage, UntypedStorage) else None


def storage_number(storage: UntypedStorage) -> int:
    """The same for all Python objects of one storage. A data pointer is not: storages without memory share it."""
    number: int = storage._cdata
    return number


def file_offset(storage: UntypedStorage) -> int | None:
    """Where in its file a storage lies that ``torch.load`` made on the meta device; torch before 2.13 may not say."""
    return getattr(storage, "_checkpoint_offset", None)


def default_store() -> Store:
    """The key-value store of the default process group, over which ranks have found each other."""
    return _get_default_store()
