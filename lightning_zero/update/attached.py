"""The optimizers that an engine drives: what is theirs, and the update of their shards."""

from __future__ import annotations

import contextlib
import types
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_zero.advice import Case, advice
from lightning_zero.sharding.adoption import begin_to_optimize, lay_out_master
from lightning_zero.sharding.bucket import Bucket
from lightning_zero.sharding.bucket_map import BucketMap
from lightning_zero.sharding.layout import Segment
from lightning_zero.torch_private import mark_for_schedulers
from lightning_zero.update.shell import StepCall
from lightning_zero.update.step_updates import StepUpdates
from lightning_zero.update.view import Updater


@dataclass
class _Attached:
    """An optimizer's updater, and what was seen in its groups so far."""

    updater: Updater
    admitted: list[int] = field(default_factory=list)  # ids of the parameters
    buckets: list[Bucket] = field(default_factory=list)  # that hold them
    prepared: bool = True  # whether the updater has seen these


class AttachedOptimizers:
    """The optimizers whose ``step`` and ``zero_grad`` act on shards; iterates over them in the order given.

    Args:
        bucket_map: of the module; optimizers may have the parameters that its buckets hold.
    """

    def __init__(self, bucket_map: BucketMap) -> None:
        self._map = bucket_map
        self._attached: dict[int, _Attached] = {}  # by id of the optimizer
        self._handles: list[RemovableHandle] = []

    def __iter__(self) -> Iterator[Optimizer]:
        return (updater.optimizer for updater in self.updaters)

    @property
    def updaters(self) -> list[Updater]:
        """The updaters of the optimizers, in the order given."""
        return [attached.updater for attached in self._attached.values()]

    def attach(self, updaters: Sequence[Updater], target: Target) -> None:
        """Replace the optimizers by those of ``updaters``; see :meth:`Engine.attach`.

        Args:
            updaters: one per optimizer; an optimizer that was among those before keeps its own.
            target: what the optimizers' methods call.

        Raises:
            ValueError: an optimizer holds what is not the module's; nothing has changed then.
        """
        for updater in updaters:
            self._check_held(updater.optimizer)
        before = self._attached
        self.detach()
        for updater in updaters:
            key = id(updater.optimizer)
            self._attached[key] = _Attached(before[key].updater if key in before else updater)
        self.admit()
        for attached in self._attached.values():
            self._prepare(attached)
            self._take_state(attached.updater)
            self._handles += attach_optimizer(attached.updater.optimizer, target)

    def detach(self) -> None:
        """Give the optimizers their own methods back."""
        for optimizer in self:
            detach_optimizer(optimizer)
        for handle in self._handles:
            handle.remove()
        self._attached, self._handles = {}, []

    def admit(self) -> None:
        """Make ready what has joined the groups of an optimizer.

        Raises:
            ValueError: where that is not the module's.
        """
        for attached in self._attached.values():
            optimizer = attached.updater.optimizer
            parameters = parameters_of(optimizer)
            if attached.admitted == (ids := list(map(id, parameters))):
                continue
            self._check_held(optimizer)
            for bucket in self._map.holders(parameters):
                begin_to_optimize(bucket)
            attached.admitted, attached.buckets, attached.prepared = ids, self._map.holders(parameters), False

    def _check_held(self, optimizer: Optimizer) -> None:
        for parameter in parameters_of(optimizer):
            if self._map.holder(parameter) is None:
                raise ValueError(f"{type(optimizer).__name__} holds {self._why_foreign(parameter)}")

    def _why_foreign(self, parameter: Parameter) -> str:
        """Why no bucket holds ``parameter``, and what to do."""
        module = type(self._map.module).__name__
        for name, own in self._map.module.named_parameters():
            if own is parameter:
                return (
                    f"{name!r}, which joined {module} after its parameters were sharded; make it with the others "
                    f"and freeze it until it is needed{advice(Case.MADE_LATE, '; ')}"
                )
        return (
            f"a parameter of shape {tuple(parameter.shape)} that is not registered in {module}; give optimizers the "
            "module's parameters"
        )

    def _prepare(self, attached: _Attached) -> None:
        """Let an updater see the buckets of what was admitted to its optimizer since the last time.

        Not between forward and backward: it may change parameters.
        """
        if not attached.prepared:
            for bucket in attached.buckets:
                layout = attached.updater.master_layout(bucket)
                if layout is not None:
                    lay_out_master(bucket, split=layout == "split")
            attached.prepared = True

    def _take_state(self, updater: Updater) -> None:
        updater.adopt(self._map.holder)
        hide_state(updater.optimizer)

    def adopt_state(self, optimizer: Optimizer) -> None:
        """Move state that user code loaded or wrote into an optimizer into shards."""
        for bucket in self._attached[id(optimizer)].buckets:
            bucket.await_update()
        updater = self._attached[id(optimizer)].updater
        if state_was_replaced(optimizer):
            updater.clear()
        self._take_state(updater)

    def with_parameter(self, parameter: Parameter) -> list[Optimizer]:
        """The optimizers that ``parameter`` was admitted to."""
        return [a.updater.optimizer for a in self._attached.values() if id(parameter) in a.admitted]

    def shares_parameters(self, optimizer: Optimizer) -> bool:
        """Tell whether a parameter of ``optimizer`` is another's too."""
        others = [a.admitted for key, a in self._attached.items() if key != id(optimizer)]
        return any(not set(ids).isdisjoint(self._attached[id(optimizer)].admitted) for ids in others)

    def begin_step(self, optimizer: Optimizer, grad_scale: float, call: StepCall) -> StepUpdates:
        """Copy what ``optimizer`` updates with, before anything is updated; see :class:`StepUpdates`.

        Args:
            optimizer: whose step it is.
            grad_scale: factor to apply to the gradients.
            call: of the optimizer's ``step``.
        """
        if state_was_edited(optimizer):
            self.adopt_state(optimizer)
        attached = self._attached[id(optimizer)]
        updates = StepUpdates(attached.updater, self._map, grad_scale, call)
        self._prepare(attached)
        return updates

    def is_prepared(self, optimizer: Optimizer) -> bool:
        """Tell whether the updater has seen all that was admitted to ``optimizer``: an update changes no layout."""
        return self._attached[id(optimizer)].prepared

    def update(self, optimizer: Optimizer, used: Sequence[Parameter], updates: StepUpdates) -> None:
        """Begin to update the shards of some parameters of ``optimizer``, in the order in which a forward needs them.

        The same call on all ranks.

        Args:
            optimizer: whose step it is.
            used: the parameters to update.
            updates: those of the step, of which some may have begun; on this rank, others on others.
        """
        used_ids = set(map(id, used))
        updates.begin([(b, segments) for b, segments in self._in_order(used) if id(b) not in updates.begun])
        for bucket in self._map.buckets:
            # Stale on all ranks or on none, also where this rank owns no segment of it.
            if indices := [i for i, p in enumerate(bucket.parameters) if id(p) in used_ids]:
                bucket.mark_updated(indices)
        self._attached[id(optimizer)].updater.advance(updates.call)

    def _in_order(self, used: Sequence[Parameter]) -> list[tuple[Bucket, list[Segment]]]:
        """Segments by bucket, those first that a forward unshards before its first unit: the root's, and small ones."""
        first = set(map(id, self._map.root))
        return sorted(self._map.segments_of(used), key=lambda each: id(each[0]) not in first)


class ShardedState(defaultdict[Tensor, dict[str, Any]]):
    """``optimizer.state`` while the state lies in shards: nothing to read, and an error that says what to do instead.

    What user code puts into it, for full parameters, is taken over by the next step; clearing it clears the shards.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(dict)
        self.cleared = False
        self._name = type(optimizer).__name__

    def __missing__(self, parameter: Tensor) -> dict[str, Any]:
        raise RuntimeError(
            f"the state of {self._name} is sharded{advice(Case.STATE_IS_SHARDED, '; ')}. Assign "
            "optimizer.state[parameter] a full parameter's state to set it, or call optimizer.state.clear()"
        )

    def clear(self) -> None:
        super().clear()
        self.cleared = True

    def __reduce__(self) -> Any:
        return defaultdict, (dict,), None, None, iter(self.items())  # a copy of the optimizer has no shards


class Expecting(Protocol):
    """Is told of a step before its backward."""

    def expecting(self, optimizer: Optimizer) -> AbstractContextManager[None]: ...


class Target(Protocol):
    """Receives the calls of the methods that are replaced."""

    @property
    def in_backward(self) -> Expecting: ...
    def step(self, optimizer: Optimizer, call: StepCall) -> bool: ...
    def zero_grad(self, parameters: Iterable[Parameter], set_to_none: bool = True) -> None: ...
    def adopt_state(self, optimizer: Optimizer) -> None: ...


def parameters_of(optimizer: Optimizer) -> list[Parameter]:
    """The parameters of all groups, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def attach_optimizer(optimizer: Optimizer, target: Target) -> list[RemovableHandle]:
    """Replace ``step`` and ``zero_grad``; guard ``state_dict`` and ``load_state_dict``. Returns the guards' handles."""
    engine = weakref.ref(target)  # an optimizer that outlives the engine must not keep its buckets alive

    def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        call = StepCall(optimizer, *args, **kwargs)
        with _alive(engine).in_backward.expecting(optimizer):
            loss = call.run_closure()
        _alive(engine).step(optimizer, call)
        return loss

    def clear(optimizer: Optimizer, set_to_none: bool = True) -> None:
        _alive(engine).zero_grad(parameters_of(optimizer), set_to_none)

    def zero_grad(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        if type(optimizer).zero_grad is Optimizer.zero_grad:
            clear(optimizer, *args, **kwargs)
        else:
            with _replaced_zero_grad(clear):
                type(optimizer).zero_grad(optimizer, *args, **kwargs)

    # Not torch's wrapper that calls step hooks: the engine does so around the update, once it knows that there is one.
    method = types.MethodType(step, optimizer)
    # Schedulers warn unless `step` carries their mark; the engine notes each step.
    mark_for_schedulers(step)
    optimizer.step = method  # type: ignore[method-assign]
    optimizer.zero_grad = types.MethodType(zero_grad, optimizer)  # type: ignore[method-assign]
    return [
        optimizer.register_state_dict_pre_hook(_refuse_state_dict),
        optimizer.register_load_state_dict_post_hook(lambda optimizer: _alive(engine).adopt_state(optimizer)),
    ]


@contextlib.contextmanager
def _replaced_zero_grad(clear: Callable[..., None]) -> Iterator[None]:
    """Put ``clear`` in the place of torch's own ``zero_grad``, which the one of a user's class may call or not."""
    own = Optimizer.zero_grad
    Optimizer.zero_grad = clear  # type: ignore[method-assign]
    try:
        yield
    finally:
        Optimizer.zero_grad = own  # type: ignore[method-assign]


def hide_state(optimizer: Optimizer) -> None:
    """Empty ``optimizer.state``, and notice what happens to it from now on."""
    optimizer.state = ShardedState(optimizer)


def state_was_edited(optimizer: Optimizer) -> bool:
    """Tell whether user code has written to the hidden state, cleared it, or put another one in its place."""
    state = optimizer.state
    return not isinstance(state, ShardedState) or state.cleared or bool(state)


def state_was_replaced(optimizer: Optimizer) -> bool:
    """Tell whether nothing of what the shards hold is part of the state any more."""
    state = optimizer.state
    return not isinstance(state, ShardedState) or state.cleared


def detach_optimizer(optimizer: Optimizer) -> None:
    """Give an optimizer its class's own methods back."""
    optimizer.state = defaultdict(dict, optimizer.state)
    for method in ("step", "zero_grad"):
        optimizer.__dict__.pop(method, None)


def attach_module(module: nn.Module, target: Target) -> None:
    """Make ``zero_grad`` of one module, which also runs on its own, clear sharded gradients as well."""
    engine = weakref.ref(target)

    own = _own_zero_grad(module)

    # Its name makes the bound method picklable, as a look-up on the unpickled module; a deep copy of the module has
    # parameters that no engine holds.
    def zero_grad(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if (alive := engine()) is not None:
            alive.zero_grad(module.parameters(), kwargs.get("set_to_none", args[0] if args else True))
        if own is None:
            type(module).zero_grad(module, *args, **kwargs)
        else:
            own(*args, **kwargs)

    zero_grad.replaced = own  # type: ignore[attr-defined]
    # Not by assignment, which torch.compile's wrapper passes on to the module inside.
    vars(module)["zero_grad"] = types.MethodType(zero_grad, module)


def detach_module(module: nn.Module) -> None:
    """Give a module the method back that it had."""
    own = _own_zero_grad(module)
    vars(module).pop("zero_grad", None)
    if own is not None:
        vars(module)["zero_grad"] = own


def _own_zero_grad(module: nn.Module) -> Callable[..., None] | None:
    """The ``zero_grad`` that user code has set on this one object, and not its class; also below ours."""
    present: Callable[..., None] | None = vars(module).get("zero_grad")
    return getattr(getattr(present, "__func__", None), "replaced", present)


def _refuse_state_dict(optimizer: Optimizer) -> None:
    raise RuntimeError(
        f"{type(optimizer).__name__}.state_dict() would be empty: the state is sharded"
        f"{advice(Case.STATE_IS_SHARDED, '; ')}"
    )


def _alive(reference: weakref.ref[Target]) -> Target:
    engine = reference()
    if engine is None:
        raise RuntimeError("this optimizer was attached to an engine that no longer exists; make a new optimizer")
    return engine
