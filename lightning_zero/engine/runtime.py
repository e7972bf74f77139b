"""The engine: drives buckets through forward, backward and step, in one order on all ranks.

    forward    stage 3: each unit gathers before and frees after (``hooks.py``)
    backward   a gradient marks its parameter ready; buckets are reduced in reverse module order, each as soon as it and
               all before it are ready
    flush      after the outermost backward: whatever has not been reduced, with zeros for what was unused here
    step       one small all-reduce; every rank then knows norm, overflow and used parameters, and updates its shards
    settle     gathers what the update made stale

Every rank issues the same collectives in the same order, whichever of its parameters were used.
"""

from __future__ import annotations

import contextlib
import copy
import math
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_zero.engine.bucket import Bucket, BucketState, Placement
from lightning_zero.engine.hooks import UnshardHooks, refresh_before_forward
from lightning_zero.engine.layout import Segment, runs
from lightning_zero.engine.partition import ROOT, Unit, find_units, make_buckets

_NORM_TILE = 1 << 20  # elements converted to float64 at a time


class Updater(Protocol):
    """Applies one optimizer's rule to shards. See :mod:`lightning_zero.optim`."""

    optimizer: Optimizer

    def update(
        self, bucket: Bucket, segments: Sequence[Segment], groups: dict[int, dict[str, Any]], grad_scale: float
    ) -> None:
        """Update the masters of ``segments`` from ``bucket.gradients`` x ``grad_scale`` and publish them.

        Args:
            bucket: holds the segments.
            segments: those to update, in ascending order; all belong to this optimizer.
            groups: the hyperparameters of each parameter of the bucket, by its index.
            grad_scale: factor to apply to the gradients.
        """
        ...


class GradientStats(NamedTuple):
    """What all ranks know of one optimizer's gradients after the small all-reduce."""

    norm: float  # global L2 norm; inf or nan where a gradient is
    found_inf: bool  # a non-finite value anywhere
    used: frozenset[int]  # ids of the parameters that received a gradient on any rank


class Engine:
    """Shards a module's parameters, gradients and optimizer state over the ranks of a mesh.

    Args:
        module: fully initialized on every rank; rank 0's parameters and buffers are broadcast.
        placement: process groups, policies, device and stores.
        optimized: parameters that optimizers may update; ``None`` means all that require a gradient.
        units: see :func:`~lightning_zero.engine.partition.find_units`.
        bucket_size_mb: size, in 2^20 bytes, up to which small units share a bucket at stages 0-2.
        skip_nonfinite: skip the step, on all ranks, when a gradient is not finite.
    """

    def __init__(
        self,
        module: nn.Module,
        placement: Placement,
        optimized: Iterable[Parameter] | None = None,
        units: Sequence[str | type[nn.Module]] | None = None,
        bucket_size_mb: float = 25.0,
        skip_nonfinite: bool = True,
    ) -> None:
        if not bucket_size_mb > 0:
            raise ValueError(f"bucket_size_mb={bucket_size_mb!r} must be greater than 0; 25 is a good start")
        self.module = module
        self.placement = placement
        self.skip_nonfinite = skip_nonfinite
        self.skipped_steps = 0
        chosen = optimized if optimized is not None else (p for p in module.parameters() if p.requires_grad)
        unit_list = find_units(module, units)
        specs = make_buckets(
            module,
            unit_list,
            {id(p) for p in chosen},
            placement.sharding,
            placement.precision,
            int(bucket_size_mb * 2**20),
        )
        self._convert_buffers()
        # Forward order; masters are made here, before anything is cast.
        self.buckets = [Bucket(", ".join(s.units), s.specs, s.dtype, s.optimized, placement) for s in specs]
        self._bucket_of = {id(p): bucket for bucket in self.buckets for p in bucket.parameters}
        self._root_buckets = [b for b, s in zip(self.buckets, specs, strict=True) if ROOT in s.units]
        self._updaters: dict[int, Updater] = {}  # by id of the optimizer
        self._clip: dict[int, float] = {}  # by id of the optimizer: factor that clipping asked for
        self._stats: dict[int, GradientStats] | None = None
        self._in_backward = False
        self._eager = False  # reduce buckets during backward, not only at its flush
        self._last_micro_batch = True
        self._pending: list[Bucket] = []  # of this backward, in launch order, not yet reduced
        self._ready: dict[int, set[int]] = {}  # by id of the bucket: parameters whose gradient has arrived
        self._expected: dict[int, int] = {}  # by id of the bucket: parameters that require a gradient
        self._handles: list[RemovableHandle] = []
        self._unshard_hooks: list[UnshardHooks] = []
        self._install_hooks(unit_list)
        _ENGINES.add(self)

    # ------------------------------------------------------------------------------------------------ construction

    def _convert_buffers(self) -> None:
        """Move buffers to the device, give them the dtype of the policy and rank 0's values."""
        precision = self.placement.precision
        for module in self.module.modules():
            for name, buffer in module._buffers.items():
                if buffer is None:
                    continue
                dtype = buffer.dtype
                if precision.cast_buffers and dtype.is_floating_point and precision.param_dtype is not None:
                    dtype = precision.param_dtype
                converted = buffer.to(self.placement.device, dtype)
                module._buffers[name] = self.placement.mesh.world.broadcast_(converted.contiguous())

    def _install_hooks(self, units: Sequence[Unit]) -> None:
        for bucket in self.buckets:
            if bucket.optimized:
                for index, parameter in enumerate(bucket.parameters):
                    hook = self._make_gradient_hook(bucket, index)
                    self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
        unit_modules = {id(unit.module) for unit in units}
        for module in self.module.modules():
            self._take_over_zero_grad(module)
            is_unit = id(module) in unit_modules
            held = self._buckets_of(module, recurse=is_unit)
            if self.placement.sharding.shard_params:
                # The root's buckets stay gathered for the whole step, whoever else holds a parameter of them.
                mine = [b for b in held if not (is_unit and b in self._root_buckets)]
                if mine:
                    self._unshard_hooks.append(UnshardHooks(module, mine, owns=is_unit))
            elif is_unit or module is self.module:
                self._handles.append(refresh_before_forward(module, held))

    def _buckets_of(self, module: nn.Module, recurse: bool) -> list[Bucket]:
        """The buckets that the forward of ``module`` reads; for the root module, those of the root."""
        held = {id(b): b for b in map(self._bucket_of.__getitem__, map(id, module.parameters(recurse=recurse)))}
        if module is self.module:
            held.update((id(b), b) for b in self._root_buckets)
        return list(held.values())

    def _make_gradient_hook(self, bucket: Bucket, index: int) -> Callable[[Tensor], None]:
        def mark_ready(_: Tensor) -> None:
            if not self._in_backward:  # `loss.backward()` by user code: reduced at the flush that the step makes
                self.begin_backward(eager=False)
            self._ready[id(bucket)].add(index)
            if self._eager:
                self._reduce_ready()

        return mark_ready

    def _take_over_zero_grad(self, module: nn.Module) -> None:
        engine = weakref.ref(self)

        # Its name makes the bound method picklable, as a look-up on the unpickled module; a deep copy of the module has
        # parameters that no engine holds.
        def zero_grad(module: nn.Module, set_to_none: bool = True) -> None:
            type(module).zero_grad(module, set_to_none)
            if (alive := engine()) is not None:
                alive.zero_grad((p for p in module.parameters() if id(p) in alive._bucket_of), set_to_none)

        module.zero_grad = types.MethodType(zero_grad, module)  # type: ignore[method-assign]

    # ----------------------------------------------------------------------------------------- forward and backward

    @contextlib.contextmanager
    def forward_context(self) -> Iterator[None]:
        """Around one forward pass of the module: the root's parameters are whole inside.

        With gradients enabled they stay whole until the flush after backward, else they are freed at the end.
        """
        for bucket in self._root_buckets:
            bucket.unshard()
        try:
            yield
        finally:
            if not torch.is_grad_enabled():
                self._reshard()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around the backward of every micro-batch but the last of a step."""
        previous, self._last_micro_batch = self._last_micro_batch, False
        try:
            yield
        finally:
            self._last_micro_batch = previous

    def begin_backward(self, eager: bool = True) -> None:
        """Before the outermost backward.

        Args:
            eager: reduce buckets while backward goes on; ``False`` leaves all to :meth:`flush`.
        """
        self._fold_clipping()
        self._stats = None
        self._in_backward = True
        self._pending = []
        for bucket in reversed(self.buckets):
            expected = sum(p.requires_grad for p in bucket.parameters) if bucket.optimized else 0
            self._ready[id(bucket)] = set()
            self._expected[id(bucket)] = expected
            # `toggle_optimizer` and frozen parts turn `requires_grad` off, on all ranks alike.
            if expected:
                self._pending.append(bucket)
        self._eager = eager and self._reduces_now

    @property
    def _reduces_now(self) -> bool:
        return self.placement.sharding.shard_grads or self._last_micro_batch

    def _reduce_ready(self) -> None:
        while self._pending and len(self._ready[id(self._pending[0])]) >= self._expected[id(self._pending[0])]:
            bucket = self._pending.pop(0)
            bucket.reduce(self._last_micro_batch)
            # All gradients are there, so backward has used all its parameters, unless some need none.
            if self._expected[id(bucket)] == len(bucket.parameters):
                bucket.reshard()

    def flush(self) -> None:
        """After the outermost backward: reduce what is left, on every rank, used or not, and free what was gathered.

        A rank that ran no backward in a micro-batch in which others did must call it all the same.
        """
        if not self._in_backward:
            self.begin_backward(eager=False)
        self._in_backward = self._eager = False
        if self._reduces_now:
            reduced_early = [b for b in reversed(self.buckets) if self._expected[id(b)] and b not in self._pending]
            for bucket in self._pending:
                bucket.reduce(self._last_micro_batch)
            # Gradients that arrived after their bucket was reduced: a parameter's hook fires several times under
            # reentrant checkpointing.
            for bucket in reduced_early:
                if bucket.has_gradient():
                    bucket.reduce(self._last_micro_batch)
        else:
            for bucket in self._pending:
                bucket.keep_local()
        self._pending = []
        for hooks in self._unshard_hooks:
            hooks.end_backward()
        self._reshard()

    def _reshard(self) -> None:
        for bucket in self.buckets:
            bucket.reshard()

    # --------------------------------------------------------------------------------------------------- optimizers

    def attach(self, updaters: Sequence[Updater]) -> None:
        """Drive these updaters' optimizers: their ``step`` and ``zero_grad`` act on shards from now on.

        The optimizer objects, their groups and parameters stay what they are. Replaces those attached before.

        Raises:
            ValueError: where an optimizer holds a parameter that the module does not, or that was not among those
                that may be optimized.
        """
        for updater in updaters:
            self._check_parameters(updater.optimizer)
        self.detach()
        for updater in updaters:
            self._updaters[id(updater.optimizer)] = updater
            self._take_over(updater.optimizer)
        self.zero_grad(p for b in self.buckets for p in b.parameters)

    def can_optimize(self, parameters: Iterable[Parameter]) -> bool:
        """Whether gradients of all ``parameters`` are reduced here."""
        buckets = [self._bucket_of.get(id(p)) for p in parameters]
        return all(bucket is not None and bucket.optimized for bucket in buckets)

    def _check_parameters(self, optimizer: Optimizer) -> None:
        for parameter in _parameters_of(optimizer):
            if not self.can_optimize([parameter]):
                raise ValueError(
                    f"{type(optimizer).__name__} holds a parameter of shape {tuple(parameter.shape)} that is not "
                    "registered in the module, or was in no optimizer when training was set up; give optimizers "
                    "registered parameters, all of them in `configure_optimizers`"
                )

    def detach(self) -> None:
        """Give the attached optimizers their own methods back."""
        for updater in self._updaters.values():
            for method in ("step", "zero_grad"):
                updater.optimizer.__dict__.pop(method, None)
        self._updaters = {}
        self._clip = {}
        self._stats = None

    def _take_over(self, optimizer: Optimizer) -> None:
        engine = weakref.ref(self)  # an optimizer that outlives the engine must not keep its buckets alive

        def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            with torch.enable_grad():
                loss = closure() if closure is not None else None
            _alive(engine).step(optimizer)
            return loss

        def zero_grad(optimizer: Optimizer, set_to_none: bool = True) -> None:
            _alive(engine).zero_grad(_parameters_of(optimizer), set_to_none)

        # The same wrapper as torch puts around every optimizer's step: pre- and post-hooks and the profiler's record.
        method = types.MethodType(Optimizer.profile_hook_step(step), optimizer)
        # Schedulers warn unless `step` carries their mark; what it stands for, `_opt_called`, the engine sets.
        method.__func__._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        optimizer.step = method  # type: ignore[method-assign]
        optimizer.zero_grad = types.MethodType(zero_grad, optimizer)  # type: ignore[method-assign]

    @property
    def updaters(self) -> list[Updater]:
        """Those attached, in the order given."""
        return list(self._updaters.values())

    def zero_grad(self, parameters: Iterable[Parameter], set_to_none: bool = True) -> None:
        """Clear gradients of ``parameters``, whole ones and owned slices.

        Args:
            parameters: some of the module's.
            set_to_none: as in torch: ``False`` makes them zeros, which optimizers still apply.
        """
        self._stats = None
        by_bucket: dict[int, list[int]] = {}
        for parameter in parameters:
            bucket = self._bucket_of[id(parameter)]
            by_bucket.setdefault(id(bucket), []).append(bucket.index[id(parameter)])
            parameter.grad = None
        for bucket in self.buckets:
            if indices := by_bucket.get(id(bucket)):
                bucket.clear_gradients(indices, keep_used=not set_to_none)
        for key, updater in self._updaters.items():
            if any(id(self._bucket_of[id(p)]) in by_bucket for p in _parameters_of(updater.optimizer)):
                self._clip.pop(key, None)

    def stats(self, optimizer: Optimizer) -> GradientStats:
        """Norm, overflow and used parameters of the averaged gradients of ``optimizer``. Collective, then cached."""
        if self._in_backward:
            self.flush()
        if self._stats is None:
            self._stats = self._reduce_stats()
        return self._stats[id(optimizer)]

    def _reduce_stats(self) -> dict[int, GradientStats]:
        """The one small all-reduce of a step: norm² per optimizer, and which parameters were used anywhere."""
        owner = {id(p): n for n, u in enumerate(self._updaters.values()) for p in _parameters_of(u.optimizer)}
        norms = [0.0] * len(self._updaters)
        # Replicas hold the same slices: one of them speaks for all.
        if self.placement.mesh.replica.rank == 0:
            for bucket in self.buckets:
                if not bucket.gradients.empty:
                    _add_squares(bucket, owner, norms)
        used = [float(received) for bucket in self.buckets for received in bucket.received]
        vector = torch.tensor(norms + used, dtype=torch.float64).to(self.placement.device)
        values = self.placement.mesh.world.all_reduce_(vector).tolist()
        parameters = [p for bucket in self.buckets for p in bucket.parameters]
        used_ids = frozenset(id(p) for p, n in zip(parameters, values[len(norms) :], strict=True) if n)
        return {
            key: GradientStats(math.sqrt(square), not math.isfinite(square), used_ids)
            for key, square in zip(self._updaters, values, strict=False)
        }

    def clip_grad_norm_(self, optimizer: Optimizer, max_norm: float) -> float:
        """Scale the gradients of ``optimizer`` to a global norm of at most ``max_norm``; returns the norm before.

        As :func:`torch.nn.utils.clip_grad_norm_`, over all shards. The factor is applied inside the update. Collective.
        """
        norm = self.stats(optimizer).norm
        # A norm that is not finite is the business of `skip_nonfinite`.
        self._clip[id(optimizer)] = min(1.0, max_norm / (norm + 1e-6)) if math.isfinite(norm) else 1.0
        return norm

    def clip_grad_value_(self, optimizer: Optimizer, clip_value: float) -> None:
        """Clamp every averaged gradient of ``optimizer`` to ``[-clip_value, clip_value]``, where it is. Collective."""
        self.stats(optimizer)  # overflow is judged before a clamp hides it
        for bucket, segments in self._owned_segments(_parameters_of(optimizer)):
            for run in runs(segments, lambda _: True):
                bucket.gradients.read(run.start, run.stop).clamp_(-clip_value, clip_value)

    def _fold_clipping(self) -> None:
        """Gradients that outlive a clipped step stay clipped when more are added to them, as in torch."""
        for key, scale in self._clip.items():
            if scale != 1.0:
                for bucket, segments in self._owned_segments(_parameters_of(self._updaters[key].optimizer)):
                    if not bucket.gradients.empty:
                        for run in runs(segments, lambda _: True):
                            bucket.gradients.read(run.start, run.stop).mul_(scale)
        self._clip = {}

    def _owned_segments(self, parameters: Iterable[Parameter]) -> Iterator[tuple[Bucket, list[Segment]]]:
        chosen = {id(p) for p in parameters}
        for bucket in self.buckets:
            segments = [s for s in bucket.segments if id(bucket.parameters[s.param]) in chosen]
            if segments:
                yield bucket, segments

    @torch.no_grad()
    def step(self, optimizer: Optimizer) -> bool:
        """Update the shards of ``optimizer``'s parameters; returns False where all ranks skip. Collective.

        Hyperparameters are copied before anything is updated, so that a scheduler may change them right after.
        """
        updater = self._updaters[id(optimizer)]
        self._check_parameters(optimizer)  # a group may have joined since
        stats = self.stats(optimizer)
        optimizer._opt_called = True  # type: ignore[attr-defined]  # for schedulers, see `_take_over`
        if stats.found_inf and self.skip_nonfinite:
            self.skipped_steps += 1
            self.zero_grad(_parameters_of(optimizer))
            if self.placement.mesh.world.rank == 0:
                warnings.warn(
                    f"skipped a step of {type(optimizer).__name__} on all ranks: a gradient is inf or nan "
                    f"(skipped so far: {self.skipped_steps}; skip_nonfinite=False would apply it)",
                    stacklevel=2,
                )
            return False
        scale = self._clip.get(id(optimizer), 1.0)
        hyperparameters = _snapshot(optimizer)
        used = [p for p in _parameters_of(optimizer) if id(p) in stats.used]
        for bucket in self.buckets:
            if bucket.state is BucketState.GATHERED:
                bucket.absorb_edits()
        for bucket, segments in self._owned_segments(used):
            groups = {i: hyperparameters[id(p)] for i, p in enumerate(bucket.parameters) if id(p) in hyperparameters}
            updater.update(bucket, segments, groups, scale)
        # A bucket is stale on all ranks or on none, also where this rank owns no segment of it.
        touched = {id(self._bucket_of[id(p)]) for p in used}
        for bucket in self.buckets:
            if id(bucket) in touched:
                bucket.mark_updated()
        return True

    # -------------------------------------------------------------------------------------------------- consistency

    def settle(self) -> None:
        """Finish updates and gathers: afterwards no whole parameter is older than its shards. Collective."""
        for bucket in self.buckets:
            if bucket.state is BucketState.STALE:
                bucket.unshard()

    @contextlib.contextmanager
    def gathered(self, parameters: Iterable[Parameter], writeback: bool = False) -> Iterator[None]:
        """Hold ``parameters`` whole inside the context, on all ranks. Collective, on entry and on exit.

        In-place changes that torch's version counter sees are taken over on exit; each rank must make the same.

        Args:
            parameters: some of the module's.
            writeback: take over all values on exit, rank 0's on all ranks, also those written through ``.data``.
        """
        chosen = {id(self._bucket_of[id(p)]) for p in parameters if id(p) in self._bucket_of}
        buckets = [bucket for bucket in self.buckets if id(bucket) in chosen]
        for bucket in buckets:
            bucket.unshard()
            bucket.pins += 1
        try:
            yield
        finally:
            for bucket in buckets:
                bucket.pins -= 1
                if writeback:
                    self.placement.mesh.world.broadcast_(bucket.flat)
                if bucket.state is BucketState.GATHERED:
                    bucket.absorb_edits(everything=writeback)
                bucket.reshard()

    def release(self) -> None:
        """Undo everything: ordinary parameters at full precision, no hooks, optimizers of their own. Collective."""
        self.detach()
        for module in self.module.modules():
            module.__dict__.pop("zero_grad", None)
        for handle in self._handles:
            handle.remove()
        for hooks in self._unshard_hooks:
            hooks.remove()
        for bucket in self.buckets:
            bucket.release()
        self.buckets = []
        self._bucket_of = {}
        _ENGINES.discard(self)

    def bucket_of(self, parameter: Tensor) -> Bucket | None:
        """The bucket that holds ``parameter``, or ``None``."""
        return self._bucket_of.get(id(parameter))


_ENGINES: weakref.WeakSet[Engine] = weakref.WeakSet()


def engines_of(module: nn.Module) -> list[Engine]:
    """The engines that hold parameters of ``module``."""
    parameters = list(module.parameters())
    return [engine for engine in _ENGINES if any(engine.bucket_of(p) is not None for p in parameters)]


@contextlib.contextmanager
def gathered_parameters(
    module_or_params: nn.Module | Parameter | Iterable[Parameter], writeback: bool = False
) -> Iterator[None]:
    """Hold parameters whole inside the context; a collective call that all ranks must make.

    Where nothing is sharded it does nothing. Inside, the module may run any number of forward passes, a different
    number on each rank.

    Args:
        module_or_params: a module (all its parameters), a parameter, or several.
        writeback: keep what was changed inside, as rank 0 has it. Without it, changes that torch's version counter sees
            (``weight.clamp_(...)`` under ``no_grad``) are kept too, and must be the same on all ranks; changes through
            ``.data`` are lost.
    """
    if isinstance(module_or_params, nn.Module):
        parameters = list(module_or_params.parameters())
    else:
        parameters = [module_or_params] if isinstance(module_or_params, Parameter) else list(module_or_params)
    engines = [engine for engine in _ENGINES if any(engine.bucket_of(p) is not None for p in parameters)]
    with contextlib.ExitStack() as stack:
        for engine in engines:
            stack.enter_context(engine.gathered(parameters, writeback))
        yield


def _parameters_of(optimizer: Optimizer) -> list[Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _snapshot(optimizer: Optimizer) -> dict[int, dict[str, Any]]:
    """The hyperparameters of every parameter, by its id; parameters of one group share one copy."""
    snapshot: dict[int, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        frozen = {k: copy.deepcopy(v) for k, v in group.items() if k not in ("params", "param_names")}
        snapshot.update((id(parameter), frozen) for parameter in group["params"])
    return snapshot


def _add_squares(bucket: Bucket, owner: dict[int, int], norms: list[float]) -> None:
    """Add the squares of a bucket's owned gradients to the sum of each optimizer, in float64.

    A non-finite element makes the sum non-finite, and squares of finite fp32 elements cannot overflow float64.
    """
    for run in runs(bucket.segments, lambda s: owner.get(id(bucket.parameters[s.param]))):
        which = owner[id(bucket.parameters[run.segments[0].param])]
        for tile in bucket.gradients.read(run.start, run.stop).split(_NORM_TILE):
            wide = tile.double()
            norms[which] += float(torch.dot(wide, wide))


def _alive(reference: weakref.ref[Engine]) -> Engine:
    engine = reference()
    if engine is None:
        raise RuntimeError("this optimizer was attached to an engine that no longer exists; make a new optimizer")
    return engine
