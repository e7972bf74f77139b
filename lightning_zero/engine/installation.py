"""Which hooks go where: on every parameter for its gradient, on modules for the parameters that they read."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from lightning_zero.engine.bucket_map import BucketMap
from lightning_zero.engine.compiled import Handle, attach, inside_graphs, is_compiled, named_modules
from lightning_zero.engine.hooks import OnBackwardEnd, RefreshHook, UnshardHooks
from lightning_zero.engine.partition import Unit

OnGradient = Callable[[int, int], None]


class GradientHooks:
    """Tell when the gradient of a parameter has been accumulated.

    Args:
        bucket_map: of the module.
        on_gradient: a method, which is not kept alive; takes a bucket's number and a parameter's in it.
    """

    def __init__(self, bucket_map: BucketMap, on_gradient: OnGradient) -> None:
        notify = weakref.WeakMethod(on_gradient)
        self._hooks: list[tuple[Parameter, RemovableHandle]] = [
            (parameter, _hook_gradient(parameter, notify, number, index))
            for number, bucket in enumerate(bucket_map.buckets)
            for index, parameter in enumerate(bucket.parameters)
            if parameter.is_floating_point()
        ]

    def come_last(self) -> None:
        """Gradients are ready when the hooks of user code, of which more may have come, have run."""
        for parameter, handle in self._hooks:
            hooks = parameter._post_accumulate_grad_hooks
            if next(reversed(hooks)) != handle.id:
                # Not `move_to_end`: autograd goes by the order of insertion.
                hooks[handle.id] = hooks.pop(handle.id)

    def remove(self) -> None:
        """Detach from the parameters."""
        for _, handle in self._hooks:
            handle.remove()
        self._hooks = []


def _hook_gradient(
    parameter: Parameter, notify: weakref.WeakMethod[OnGradient], number: int, index: int
) -> RemovableHandle:
    # Neither engine nor bucket: Python's collector does not see references held by a tensor's hooks.
    def hook(_: Tensor) -> None:
        if (on_gradient := notify()) is not None:
            on_gradient(number, index)

    requires_grad = parameter.requires_grad
    parameter.requires_grad_(True)  # a hook can be registered on nothing else; it stays when that is turned off
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)
    parameter.requires_grad_(requires_grad)
    return handle


def install_refresh_hooks(bucket_map: BucketMap, units: Sequence[Unit]) -> list[Handle]:
    """Stages 0-2: the module and its units gather what is stale before they compute."""
    around = inside_graphs(bucket_map.module)
    readers = [around.get(id(unit.module), unit.module) for unit in units]
    handles: list[Handle] = []
    for module in {id(m): m for m in (bucket_map.module, *readers)}.values():
        # The whole module gathers everything first: ranks may enter its units in different orders.
        read = bucket_map.buckets if module is bucket_map.module else bucket_map.read_by(module)
        handles += attach(module, RefreshHook(read))
    return handles


def install_unshard_hooks(
    bucket_map: BucketMap, units: Sequence[Unit], gather: Callable[[int], None], on_unit_end: OnBackwardEnd
) -> list[UnshardHooks]:
    """Stage 3: units gather and free their own buckets; other modules that hold parameters themselves gather them.

    Args:
        bucket_map: of the module.
        units: of the module, in its order.
        gather: makes the n-th unit's own buckets whole.
        on_unit_end: see :class:`UnshardHooks`.

    Raises:
        ValueError: a unit lies inside a graph.
    """
    around = inside_graphs(bucket_map.module)
    _check_compiled(bucket_map.module, units, around)
    installed: list[UnshardHooks] = []
    inside: dict[int, UnshardHooks] = {}  # by id of a module: the hooks of the unit it lies in

    def install(hooks: UnshardHooks, module: nn.Module) -> None:
        hooks.install(module)
        installed.append(hooks)

    for number, unit in enumerate(units):
        own = bucket_map.own(unit)
        shared = [b for b in bucket_map.read_by(unit.module) if b not in own]
        hooks = UnshardHooks(own, on_unit_end, gather=functools.partial(gather, number), shared=shared)
        install(hooks, unit.module)
        inside.update((id(module), hooks) for module in unit.module.modules())
    unit_modules = {id(unit.module) for unit in units}
    for module in bucket_map.module.modules():
        read = bucket_map.read_by(module, recurse=is_compiled(module))
        if read and id(module) not in unit_modules and id(module) not in around:
            install(UnshardHooks(read, unit=inside.get(id(module))), module)
    return installed


def _check_compiled(root: nn.Module, units: Sequence[Unit], around: Mapping[int, nn.Module]) -> None:
    """Raise where a unit lies inside a graph, in which it cannot gather its parameters."""
    for unit in units:
        if (compiled := around.get(id(unit.module))) is not None:
            name = next(name for name, module in named_modules(root) if module is compiled)
            as_unit = f", or make it one unit with units=[{name!r}]" if name else ""
            raise ValueError(
                f"{name or type(root).__name__} is compiled as a whole: at stage 3 its graph cannot gather the "
                f"parameters of {unit.name!r} inside it. Compile the units instead, each by `.compile()`{as_unit}"
            )
