"""Forward and backward hooks: at stage 3 parameters are unsharded only while their unit computes.

A unit gathers its buckets before its forward and frees them afterwards. It gathers them again when the first gradient
of its outputs arrives, and frees them when its whole backward has run. Every other module that holds parameters itself
gathers their buckets as well, so that calling a part of the model (``module.net.generate()``) works.

The end of a call's backward is found as follows. Autograd runs ready nodes in descending order of their sequence
numbers, and a node has a lower number than the nodes that use its result. So when autograd comes to the node that made
the *latest input* of the call, all nodes made during the call have run, also those that do not lie between input and
output. (Accumulation into leaves is an exception, since it runs at once; so inputs that are leaves are ignored. If no
other input requires a gradient, as where reentrant checkpointing computes a unit again, the call gets views of them.)
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from lightning_zero.sharding.bucket import Bucket
from lightning_zero.sharding.bucket_map import BucketMap
from lightning_zero.sharding.compiled import Arguments, Handle, attach, inside_graphs, is_compiled
from lightning_zero.sharding.left_tensors import LeftTensors
from lightning_zero.sharding.partition import Unit
from lightning_zero.torch_private import (
    autograd_number,
    base_of,
    gradient_hooks,
    inside_backward,
    tree_leaves,
    tree_map,
)

_DEPTH = 3  # levels of nested objects that are searched for a unit's output tensors

OnBackwardEnd = Callable[[Sequence[Bucket]], None]


class _Due:
    """Work to do when autograd comes to a node: calls whose backward ends there, and calls whose backward begins.

    A unit is freed before the next one is gathered. If the same unit is called twice in a row, its next backward is
    begun first, so that it stays gathered between its calls and is reduced once.
    """

    __slots__ = ("begins", "ends")

    def __init__(self) -> None:
        self.ends: list[tuple[UnshardHooks, _Call]] = []
        self.begins: list[tuple[UnshardHooks, _Call]] = []

    def __call__(self, grads: Sequence[Tensor | None]) -> None:
        ending = {id(hooks) for hooks, _ in self.ends}
        for hooks, call in self.begins:
            if id(hooks) in ending:
                hooks.begin_backward(call)
        for hooks, call in reversed(self.ends):
            hooks.end_call(call)
        for hooks, call in self.begins:
            if id(hooks) not in ending:
                hooks.begin_backward(call)


def _due_at(node: Node) -> _Due:
    """The work to do at ``node``; it lives as long as the node does."""
    metadata = cast("dict[Any, Any]", node.metadata)  # a dict, which torch's stub declares as a method
    if _Due not in metadata:
        metadata[_Due] = _Due()
        node.register_prehook(metadata[_Due])
    return cast("_Due", metadata[_Due])


class _Call:
    """One forward call of a module, which may run backward several times (``retain_graph``)."""

    __slots__ = ("begun", "latest_input")

    def __init__(self) -> None:
        # Number of the node at which the call's backward ends. A reference to the node itself would be a cycle, since
        # its hooks refer to the call, and Python's garbage collector does not see that cycle.
        self.latest_input = -1
        self.begun: object = None  # the generation (see `UnshardHooks._generation`) in which its backward has begun


class UnshardHooks:
    """The hooks of one module.

    Args:
        buckets: the buckets that the module's forward and backward need. A unit frees them after forward and backward.
        on_backward_end: called when the backward of a unit has run, on all ranks in the same order. ``None`` for a
            module that is no unit; its parameters are freed by its unit or at the end of the step.
        unit: the hooks of the unit that the module lies in; while the unit computes, those of the module do nothing.
        gather: unshards all ``buckets`` of a unit; ``None``: they are unsharded one by one.
        shared: buckets that a unit reads but does not free.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        on_backward_end: OnBackwardEnd | None = None,
        unit: UnshardHooks | None = None,
        gather: Callable[[], None] | None = None,
        shared: Sequence[Bucket] = (),
    ) -> None:
        self._buckets = tuple(buckets)
        self._shared = tuple(shared)
        self._gather_own = gather
        self._on_backward_end = on_backward_end
        self._unit = unit
        self._calls: list[_Call] = []  # forward calls that have not returned
        self._in_backward = 0  # number of calls of a unit whose backward has begun and not ended
        # Set by a backward with `create_graph`: a second backward needs the same parameters, so the flush frees them.
        self._twice = False
        self._generation = object()  # replaced at every flush
        self._left: Iterable[Tensor] = ()
        self._handles: list[Handle] = []

    def install(self, module: nn.Module) -> None:
        """Attach the hooks to ``module``."""
        self._left = LeftTensors(module)
        self._handles = attach(module, self._before_forward, self._after_forward)

    def remove(self) -> None:
        """Detach the hooks from the module."""
        for handle in self._handles:
            handle.remove()

    @staticmethod
    @contextlib.contextmanager
    def forward(installed: Sequence[UnshardHooks]) -> Iterator[None]:
        """Surrounds a forward: if it raises, calls that have not returned will not.

        torch runs no hook at the end of a call that Ctrl-C or :class:`SystemExit` ends.
        """
        try:
            yield
        except BaseException:
            for hooks in installed:
                hooks._calls.clear()
            raise

    def end_backward(self) -> None:
        """Forget calls whose backward has no end that a hook could see; called after the outermost backward."""
        self._in_backward = 0
        self._twice = False
        self._generation = object()

    def __deepcopy__(self, memo: dict[int, Any]) -> UnshardHooks:
        return UnshardHooks(())  # the parameters of a copied module are in no bucket

    def __reduce__(self) -> tuple[Any, ...]:
        return UnshardHooks, ((),)

    def _covered(self) -> bool:
        return self._unit is not None and bool(self._unit._calls)

    def _gather(self) -> None:
        for bucket in self._shared if self._gather_own else (*self._shared, *self._buckets):
            bucket.unshard()
        if self._gather_own:
            self._gather_own()

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        if self._covered():
            return None
        self._gather()
        call = _Call()
        self._calls.append(call)
        # A forward inside backward recomputes an activation checkpoint; the work noted by the first forward is valid.
        if self._on_backward_end is None or self._in_backward or not torch.is_grad_enabled():
            return None
        made = [_maker(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        viewed = None
        latest = max(filter(None, made), key=_number, default=None)
        if latest is None and inside_backward():  # it is recomputed from leaves that nobody else knows
            viewed, latest = _with_views(args, kwargs)
        if latest is not None:
            call.latest_input = _number(latest)
            _due_at(latest).ends.append((self, call))
        return viewed

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self._covered() or not self._calls:
            return output
        call = self._calls.pop()
        if self._in_backward:
            return output
        output = self._with_own_nodes(output, call)
        outputs = list(self._outputs(module, output, call)) if torch.is_grad_enabled() else []
        for tensor in outputs:
            node = _maker(tensor)
            if node is not None and _number(node) > call.latest_input:
                _due_at(node).begins.append((self, call))
            else:  # a leaf, or a view of a tensor made before the call
                tensor.register_hook(partial(self._begin_backward_at, call))
        # If backward will run but no output shows when it begins, the unit stays unsharded until the flush. A unit that
        # calls itself goes on computing.
        ends = self._on_backward_end is not None and not self._twice and not self._calls
        if ends and (outputs or not self._has_backward(call)):
            for bucket in self._buckets:
                bucket.reshard()
        return output

    def _with_own_nodes(self, output: Any, call: _Call) -> Any:
        """Clone the tensors of a unit's output that the unit passed through unchanged, so that the call has a node.

        So backward passes through the units in the reverse order of forward, also on a rank that used no parameters of
        several units in a row, and the gathers and reductions have the same order on all ranks.
        """
        if self._on_backward_end is None or not torch.is_grad_enabled():
            return output

        def own(value: Any) -> Any:
            if not isinstance(value, Tensor) or isinstance(value, Parameter) or not value.requires_grad:
                return value
            # A clone, not a view: `_maker` takes the node of a view's base.
            return value if _number(value.grad_fn) > call.latest_input else value.clone()

        return tree_map(own, output, is_leaf=lambda value: not isinstance(value, tuple))

    def _outputs(self, module: nn.Module, output: Any, call: _Call) -> Iterator[Tensor]:
        """The tensors at which backward may enter the call: its results, and tensors that it left on the unit."""
        for tensor in _tensors(output, _DEPTH):
            # Not a parameter that is returned unchanged: it has hooks of its own, and outlives the call.
            if tensor.requires_grad and not isinstance(tensor, Parameter):
                yield tensor
        if self._on_backward_end is not None:
            for tensor in self._left:
                if _number(_maker(tensor)) > call.latest_input:
                    yield tensor

    def _has_backward(self, call: _Call) -> bool:
        trainable = any(p.requires_grad for bucket in self._buckets for p in bucket.parameters)
        return torch.is_grad_enabled() and (call.latest_input >= 0 or trainable)

    def _begin_backward_at(self, call: _Call, grad: Tensor) -> None:
        self.begin_backward(call)

    def begin_backward(self, call: _Call) -> None:
        """Gather the buckets: a gradient of a call's outputs has arrived."""
        self._gather()
        self._twice |= torch.is_grad_enabled()
        # Not of a module that is no unit: nothing tells when its backward ends, which user code may run by itself.
        if self._on_backward_end is not None and call.begun is not self._generation:
            call.begun = self._generation
            self._in_backward += 1

    def end_call(self, call: _Call) -> None:
        """Note that the backward of a call has run; do nothing if it has not begun."""
        if call.begun is not self._generation:
            return
        call.begun = None
        # If a module is called twice and the output of the first call is the input of the second, the backward of the
        # first call may have begun already.
        self._in_backward -= 1
        if not self._in_backward and not self._twice and self._on_backward_end is not None:
            self._on_backward_end(self._buckets)


class RefreshHook:
    """A hook for stages 0 to 2, which waits for the last update and gathers stale buckets before a module's forward.

    Args:
        buckets: the buckets that the module reads.
        others: buckets that are gathered before these, unless their gather is deferred.
    """

    def __init__(self, buckets: Sequence[Bucket], others: Sequence[Bucket] = ()) -> None:
        self._buckets = tuple(buckets)
        self._others = tuple(others)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for bucket in self._others:
            if not bucket.deferred:
                bucket.unshard()
        for bucket in self._buckets:
            bucket.unshard()

    def __deepcopy__(self, memo: dict[int, Any]) -> RefreshHook:
        return RefreshHook(())

    def __reduce__(self) -> tuple[Any, ...]:
        return RefreshHook, ((),)


def _with_views(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Arguments | None, Node | None]:
    """Replaces leaves that require a gradient, and views of leaves, by views; not in containers that a call may fill.

    Returns:
        The arguments, and the latest node that made a view; ``None`` and ``None`` if there is no such leaf.
    """
    latest: Node | None = None

    def view(value: Any) -> Any:
        nonlocal latest
        if not isinstance(value, Tensor) or isinstance(value, Parameter):
            return value
        if value.is_nested or value.layout is not torch.strided or not (base_of(value).is_leaf and value.requires_grad):
            return value
        viewed = value.view_as(value)
        latest = viewed.grad_fn
        return viewed

    def views(value: Any) -> Any:
        return tree_map(view, value, is_leaf=lambda part: not isinstance(part, tuple))

    viewed = views(args), {name: views(value) for name, value in kwargs.items()}
    return (None, None) if latest is None else (viewed, latest)


def _maker(tensor: Tensor) -> Node | None:
    """The node that made a tensor or, for a view, its base: an operation in place gives a view a new node."""
    return base_of(tensor).grad_fn


def _number(node: Node | None) -> int:
    """The sequence number of a node, larger for later nodes; -1 for ``None``."""
    return -1 if node is None else autograd_number(node)


def _tensors(value: Any, depth: int) -> Iterator[Tensor]:
    """The tensors in nested containers and in attributes of objects such as dataclasses, ``depth`` objects deep."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif depth and hasattr(leaf, "__dict__") and not callable(leaf):
            yield from _tensors(vars(leaf), depth - 1)


OnGradient = Callable[[int, int], None]


class GradientHooks:
    """Calls a method whenever the gradient of a parameter has been accumulated.

    Args:
        bucket_map: the buckets of the module.
        on_gradient: a bound method, held by a weak reference; takes the number of the bucket and the parameter's index
            in it.
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
        """Move the hooks behind those of user code, also newly registered ones, which may still change gradients."""
        for parameter, handle in self._hooks:
            hooks = gradient_hooks(parameter)
            if next(reversed(hooks)) != handle.id:
                # Not `move_to_end`: autograd calls hooks in the order of insertion.
                hooks[handle.id] = hooks.pop(handle.id)

    def remove(self) -> None:
        """Detach the hooks from the parameters."""
        for _, handle in self._hooks:
            handle.remove()
        self._hooks = []


def _hook_gradient(
    parameter: Parameter, notify: weakref.WeakMethod[OnGradient], number: int, index: int
) -> RemovableHandle:
    # The hook refers to neither engine nor bucket, since Python's collector does not see references of tensor hooks.
    def hook(_: Tensor) -> None:
        if (on_gradient := notify()) is not None:
            on_gradient(number, index)

    requires_grad = parameter.requires_grad
    parameter.requires_grad_(True)  # needed to register a hook; the hook stays when it is turned off again
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)
    parameter.requires_grad_(requires_grad)
    return handle


def install_refresh_hooks(bucket_map: BucketMap, units: Sequence[Unit]) -> list[Handle]:
    """Install the hooks of stages 0 to 2: the module and its units gather stale buckets before they compute."""
    around = inside_graphs(bucket_map.module)
    readers = [around.get(id(unit.module), unit.module) for unit in units]
    handles: list[Handle] = []
    for module in {id(m): m for m in (bucket_map.module, *readers)}.values():
        root = module is bucket_map.module
        read = bucket_map.read_by(module, recurse=not root or is_compiled(module))
        # Buckets that are not deferred are gathered by the whole module, since ranks may enter units in other orders.
        alone = bucket_map.placement.mesh.shard.size == 1
        handles += attach(module, RefreshHook(read, [] if alone or not root else bucket_map.buckets))
    return handles


def install_unshard_hooks(
    bucket_map: BucketMap, units: Sequence[Unit], gather: Callable[[int], None], on_unit_end: OnBackwardEnd
) -> list[UnshardHooks]:
    """Install the hooks of stage 3: units gather and free their buckets; other modules with parameters gather theirs.

    Args:
        bucket_map: the buckets of the module.
        units: the units of the module, in module order.
        gather: unshards the buckets that belong to unit number n only.
        on_unit_end: ``on_backward_end`` of the units; see :class:`UnshardHooks`.
    """
    around = inside_graphs(bucket_map.module)
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
