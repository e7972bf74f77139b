"""The optimizers that an engine drives. Their methods act on shards, and their state is kept in shards."""

from __future__ import annotations

import contextlib
import types
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
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
from lightning_zero.update.loading import keeping_digits
from lightning_zero.update.shell import StepCall
from lightning_zero.update.step_updates import StepUpdates
from lightning_zero.update.updaters import Updater


@dataclass
class _Attached:
    """An attached optimizer's updater, and the contents of the optimizer's groups when they were last examined."""

    updater: Updater
    admitted: list[int] = field(default_factory=list)  # ids of the parameters in the groups
    buckets: list[Bucket] = field(default_factory=list)  # the buckets that hold these parameters
    prepared: bool = True  # whether the masters of these buckets have the layout that the updater needs


class AttachedOptimizers:
    """The optimizers whose ``step`` and ``zero_grad`` act on shards. Iteration yields them in the order given.

    Args:
        bucket_map: holds the module's parameters. Optimizers may have no other parameters.
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
        """Replace the attached optimizers by those of ``updaters``; see :meth:`Engine.attach`.

        Args:
            updaters: one per optimizer; an optimizer that was attached before keeps its updater and its state.
            target: receives the calls of the optimizers' methods.

        Raises:
            ValueError: an optimizer holds a parameter that is not the module's, or its updater cannot update a bucket.
                Then those attached before still are.
        """
        for updater in updaters:
            self._check_held(updater.optimizer)
        for optimizer in self:
            self._adopt_edits(optimizer)  # between two fits
        known = {id(updater.optimizer): updater for updater in (*updaters, *self.updaters)}
        made = {id(updater.optimizer): _Attached(known[id(updater.optimizer)]) for updater in updaters}
        for attached in made.values():
            self._admit(attached)
        for attached in made.values():
            self._prepare(attached)
        self.detach()
        self._attached = made
        for attached in made.values():
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
        """Find parameters that were added to the groups of an optimizer, and begin to optimize their buckets.

        Raises:
            ValueError: a parameter that was added is not the module's.
        """
        for attached in self._attached.values():
            self._admit(attached)

    def _admit(self, attached: _Attached) -> None:
        parameters = parameters_of(attached.updater.optimizer)
        if attached.admitted == (ids := list(map(id, parameters))):
            return
        self._check_held(attached.updater.optimizer)
        for bucket in self._map.holders(parameters):
            begin_to_optimize(bucket)
        attached.admitted, attached.buckets, attached.prepared = ids, self._map.holders(parameters), False

    def _check_held(self, optimizer: Optimizer) -> None:
        for parameter in parameters_of(optimizer):
            if self._map.holder(parameter) is None:
                raise ValueError(f"{type(optimizer).__name__} holds {self._why_foreign(parameter)}")

    def _why_foreign(self, parameter: Parameter) -> str:
        """Say why no bucket holds ``parameter``, and what the user can do about it."""
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
        """Give the masters of newly admitted buckets the layout that the updater needs.

        This may change parameters, and so must not run between forward and backward.
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
        """Move the state that user code has loaded into an optimizer, or assigned to it, into shards."""
        for bucket in self._attached[id(optimizer)].buckets:
            bucket.await_update()
        updater = self._attached[id(optimizer)].updater
        if state_was_replaced(optimizer):
            updater.clear()
        self._take_state(updater)

    def differing(self, defaults: Collection[torch.dtype]) -> list[Bucket]:
        """The buckets with updates that may differ between some default dtypes of torch."""
        return [b for a in self._attached.values() if not a.updater.alike_under(defaults) for b in a.buckets]

    def _adopt_edits(self, optimizer: Optimizer) -> None:
        if state_was_edited(optimizer):
            self.adopt_state(optimizer)

    def with_parameter(self, parameter: Parameter) -> list[Optimizer]:
        """The optimizers that have ``parameter`` in a group."""
        return [a.updater.optimizer for a in self._attached.values() if id(parameter) in a.admitted]

    def shares_parameters(self, optimizer: Optimizer) -> bool:
        """Tell whether a parameter of ``optimizer`` belongs to another optimizer, too."""
        others = [a.admitted for key, a in self._attached.items() if key != id(optimizer)]
        return any(not set(ids).isdisjoint(self._attached[id(optimizer)].admitted) for ids in others)

    def own_parameters(self, optimizer: Optimizer) -> list[Parameter]:
        """The parameters of ``optimizer`` that no other optimizer has."""
        others = {number for key, a in self._attached.items() if key != id(optimizer) for number in a.admitted}
        return [parameter for parameter in parameters_of(optimizer) if id(parameter) not in others]

    def begin_step(self, optimizer: Optimizer, grad_scale: float, call: StepCall) -> StepUpdates:
        """Copy the hyperparameters and attributes with which ``optimizer`` updates, before anything is updated.

        Args:
            optimizer: the optimizer that makes the step.
            grad_scale: factor to apply to the gradients.
            call: the call of the optimizer's ``step``.

        Returns:
            The updates of the step, of which none has begun; see :class:`StepUpdates`.

        Raises:
            ValueError: a hyperparameter is out of range; nothing has been written then.
        """
        self._adopt_edits(optimizer)
        attached = self._attached[id(optimizer)]
        updates = StepUpdates(attached.updater, self._map, grad_scale, call)
        self._prepare(attached)
        return updates

    def is_prepared(self, optimizer: Optimizer) -> bool:
        """Tell whether :meth:`begin_step` leaves the layout of masters as it is, so that backward may call it."""
        return self._attached[id(optimizer)].prepared

    def update(self, optimizer: Optimizer, used: Sequence[Parameter], updates: StepUpdates) -> None:
        """Begin those updates of a step that have not begun, in the order in which the next forward needs them.

        All ranks must make the same call.

        Args:
            optimizer: the optimizer that makes the step.
            used: the parameters to update.
            updates: the updates of the step. Some may have begun in backward; which ones may differ between ranks.
        """
        used_ids = set(map(id, used))
        updates.begin([(b, segments) for b, segments in self._in_order(used) if id(b) not in updates.begun])
        for bucket in self._map.buckets:
            # All ranks must mark the same buckets, also a rank that owns no segment of them.
            if indices := [i for i, p in enumerate(bucket.parameters) if id(p) in used_ids]:
                bucket.mark_updated(indices)
        self._attached[id(optimizer)].updater.advance(updates.call)

    def _in_order(self, used: Sequence[Parameter]) -> list[tuple[Bucket, list[Segment]]]:
        """The segments of ``used`` by bucket. Buckets that a forward unshards before its first unit come first.

        These are the root's buckets and the small ones.
        """
        first = set(map(id, self._map.root))
        return sorted(self._map.segments_of(used), key=lambda each: id(each[0]) not in first)


class ShardedState(defaultdict[Tensor, dict[str, Any]]):
    """Replaces ``optimizer.state`` while the state is kept in shards. To read it is an error that says what to do.

    User code may write the state of full parameters into it, which the next step moves into the shards. If user code
    clears it, the next step clears the shards.
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
    """Is told of a call of ``step`` before the closure runs."""

    def expecting(self, optimizer: Optimizer) -> AbstractContextManager[None]: ...


class Target(Protocol):
    """Receives the calls of those methods of optimizers and modules that were replaced."""

    ends_steps: bool

    @property
    def in_backward(self) -> Expecting: ...
    def step(self, optimizer: Optimizer, call: StepCall) -> bool: ...
    def zero_grad(self, parameters: Iterable[Parameter], set_to_none: bool = True) -> None: ...
    def adopt_state(self, optimizer: Optimizer) -> None: ...


def parameters_of(optimizer: Optimizer) -> list[Parameter]:
    """The parameters of all groups, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def attach_optimizer(optimizer: Optimizer, target: Target) -> list[RemovableHandle]:
    """Replace ``step``, ``zero_grad`` and ``load_state_dict``, and guard ``state_dict``.

    Returns:
        The handles of hooks.
    """
    engine = weakref.ref(target)  # an optimizer that outlives the engine must not keep its buckets alive
    loads_by_method = False

    def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        call = StepCall(optimizer, *args, **kwargs)
        target = _alive(engine)
        ends_steps, target.ends_steps = target.ends_steps, True  # those that the closure makes by itself
        try:
            with target.in_backward.expecting(optimizer):
                loss = call.run_closure()
        finally:
            target.ends_steps = ends_steps
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

    def load_state_dict(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        nonlocal loads_by_method
        loads_by_method = True
        try:
            with keeping_digits(optimizer):
                answer = type(optimizer).load_state_dict(optimizer, *args, **kwargs)
        finally:
            loads_by_method = False
        _alive(engine).adopt_state(optimizer)
        return answer

    def adopt(optimizer: Optimizer) -> None:
        if not loads_by_method:  # a class's own method may read and change what torch's, which calls this, has loaded
            _alive(engine).adopt_state(optimizer)

    # This is without torch's wrapper, which calls step hooks: the engine calls them around the update, and does not
    # call them if it skips the update.
    method = types.MethodType(step, optimizer)
    # Schedulers warn unless `step` carries their mark. The engine notes each step.
    mark_for_schedulers(step)
    optimizer.step = method  # type: ignore[method-assign]
    optimizer.zero_grad = types.MethodType(zero_grad, optimizer)  # type: ignore[method-assign]
    optimizer.load_state_dict = types.MethodType(load_state_dict, optimizer)  # type: ignore[method-assign]
    return [
        optimizer.register_state_dict_pre_hook(_refuse_state_dict),
        optimizer.register_load_state_dict_post_hook(adopt),
    ]


@contextlib.contextmanager
def _replaced_zero_grad(clear: Callable[..., None]) -> Iterator[None]:
    """Replace torch's own ``zero_grad`` by ``clear`` while the method of a user's class runs, which may call it."""
    own = Optimizer.zero_grad
    Optimizer.zero_grad = clear  # type: ignore[method-assign]
    try:
        yield
    finally:
        Optimizer.zero_grad = own  # type: ignore[method-assign]


def hide_state(optimizer: Optimizer) -> None:
    """Replace ``optimizer.state`` by an empty :class:`ShardedState`, which notices what user code does with it."""
    optimizer.state = ShardedState(optimizer)


def state_was_edited(optimizer: Optimizer) -> bool:
    """Tell whether user code has written to the hidden state, cleared it or replaced it."""
    state = optimizer.state
    return not isinstance(state, ShardedState) or state.cleared or bool(state)


def state_was_replaced(optimizer: Optimizer) -> bool:
    """Tell whether user code has dropped the state in the shards, by clearing or replacing ``optimizer.state``."""
    state = optimizer.state
    return not isinstance(state, ShardedState) or state.cleared


def detach_optimizer(optimizer: Optimizer) -> None:
    """Give an optimizer its class's own methods back."""
    optimizer.state = defaultdict(dict, optimizer.state)
    for method in ("step", "zero_grad", "load_state_dict"):
        optimizer.__dict__.pop(method, None)


def attach_module(module: nn.Module, target: Target) -> None:
    """Replace the ``zero_grad`` of a module by one that clears sharded gradients, too."""
    engine = weakref.ref(target)

    own = _own_zero_grad(module)

    # The function must have this name so that the bound method can be pickled: unpickling looks the name up on the
    # module. The engine holds no parameters of a deep copy of the module, and so clears nothing there.
    def zero_grad(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if (alive := engine()) is not None:
            alive.zero_grad(module.parameters(), kwargs.get("set_to_none", args[0] if args else True))
        if own is not None:
            own(*args, **kwargs)
        elif alive is None or type(module).zero_grad is not nn.Module.zero_grad:
            type(module).zero_grad(module, *args, **kwargs)
        # Torch's own would do the same, but would read gradients, which nobody may between micro-batches.

    zero_grad.replaced = own  # type: ignore[attr-defined]
    # An assignment would not do: torch.compile's wrapper passes it on to the module inside.
    vars(module)["zero_grad"] = types.MethodType(zero_grad, module)


def detach_module(module: nn.Module) -> None:
    """Give a module back the ``zero_grad`` that it had before :func:`attach_module`."""
    own = _own_zero_grad(module)
    vars(module).pop("zero_grad", None)
    if own is not None:
        vars(module)["zero_grad"] = own


def _own_zero_grad(module: nn.Module) -> Callable[..., None] | None:
    """The ``zero_grad`` that user code has set on this object itself, even if ours has replaced it since."""
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
