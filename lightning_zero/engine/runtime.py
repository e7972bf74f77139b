"""The engine: drives buckets through forward, backward and step, in one order on all ranks.

    forward    stage 3: each unit gathers before and frees after (``hooks.py``)
    backward   gradients are reduced in one order on all ranks (``reducer.py``)
    flush      after the outermost backward: whatever has not been reduced, with zeros for what was unused here
    step       one small all-reduce; every rank then knows norm, overflow and used parameters, and updates its shards
    settle     gathers what the update made stale

Every rank issues the same collectives in the same order, whichever of its parameters were used.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils.hooks import RemovableHandle

from lightning_zero import ops
from lightning_zero.engine.bucket import Bucket, BucketState
from lightning_zero.engine.bucket_map import BucketMap
from lightning_zero.engine.buffers import broadcast_buffers, convert_buffers
from lightning_zero.engine.compiled import Handle
from lightning_zero.engine.freed import without_freed_checks
from lightning_zero.engine.gradient_scale import GradientScale
from lightning_zero.engine.hooks import UnshardHooks
from lightning_zero.engine.installation import GradientHooks, install_refresh_hooks, install_unshard_hooks
from lightning_zero.engine.layout import Segment, runs
from lightning_zero.engine.loss_scaler import LossScaleError, LossScaler
from lightning_zero.engine.partition import check_initialized, check_same, partition
from lightning_zero.engine.placement import Placement
from lightning_zero.engine.prefetch import Prefetcher
from lightning_zero.engine.reducer import Reducer
from lightning_zero.engine.takeover import (
    give_back_module,
    give_back_optimizer,
    hide_state,
    parameters_of,
    state_was_edited,
    state_was_replaced,
    take_over_module,
    take_over_optimizer,
)

_NORM_TILE = 1 << 20  # elements converted to float64 at a time


class Updater(Protocol):
    """Applies one optimizer's rule to shards. See :mod:`lightning_zero.optim`."""

    optimizer: Optimizer

    def prepare(self, bucket: Bucket) -> None:
        """Make ready for updates: the optimizer has parameters in ``bucket``. The same call on all ranks.

        Raises:
            ValueError: the bucket, as it is placed, cannot be updated.
        """
        ...

    def check(self, groups: Iterable[dict[str, Any]]) -> None:
        """Raise what updates with these hyperparameters would raise, on all ranks and before anything is written.

        Raises:
            ValueError: a hyperparameter is out of range.
        """
        ...

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

    def adopt(self, engine: Engine) -> None:
        """Move state that lies in the optimizer itself into shards."""
        ...

    def gather_state(self, bucket: Bucket) -> dict[int, dict[str, Any]]:
        """The whole state of a bucket's parameters, by their index in it. Collective.

        Args:
            bucket: holds the parameters.

        Returns:
            Per parameter that has state, in torch's names: tensors in the parameter's shape, on the CPU, and scalars.
        """
        ...

    def clear(self) -> None:
        """Forget all state, as before the first step."""
        ...


class GradientStats(NamedTuple):
    """What all ranks know of one optimizer's gradients after the small all-reduce."""

    norm: float  # global L2 norm of the unscaled gradients; inf or nan where a gradient is
    found_inf: bool  # a non-finite value anywhere
    used: frozenset[int]  # ids of the parameters that received a gradient on any rank


class StepOutcome(NamedTuple):
    """What became of an optimizer's last step."""

    grad_norm: float  # global L2 norm of the unscaled, averaged gradients before clipping; inf or nan where one is
    skipped: bool


class Engine:
    """Shards a module's parameters, gradients and optimizer state over the ranks of a mesh.

    Args:
        module: fully initialized on every rank; rank 0's parameters and buffers are broadcast. Parameters that
            :func:`~lightning_zero.engine.sharded_init.sharded_init` left in shards are whole one at a time at stage 3.
        placement: process groups, policies, device and stores.
        optimized: parameters that optimizers will update (others may join later); ``None`` means all that require a
            gradient.
        units: see :func:`~lightning_zero.engine.partition.find_units`.
        bucket_size_mb: size, in 2^20 bytes, up to which small units share a bucket at stages 0-2.
        scaler: chooses the factor of :meth:`scale_loss`; ``None``: no scaling. All optimizers share it.
        skip_nonfinite: skip the step, on all ranks, when a gradient is not finite; with a scaler that always happens.
        persistence_numel: parameters with at most so many elements stay whole at stage 3.
        max_live_numel: units are not gathered ahead beyond so many elements in whole units at stage 3.
        check_steps: number of first optimizer steps in which ranks compare notes before each collective.

    Raises:
        CollectiveError: where the ranks hold different modules.
    """

    def __init__(
        self,
        module: nn.Module,
        placement: Placement,
        optimized: Iterable[Parameter] | None = None,
        units: Sequence[str | type[nn.Module]] | None = None,
        bucket_size_mb: float = 25.0,
        scaler: LossScaler | None = None,
        skip_nonfinite: bool = True,
        persistence_numel: int = 0,
        max_live_numel: int | None = None,
        check_steps: int = 10,
    ) -> None:
        self.module = module
        self.placement = placement
        self.released = False
        self.skip_nonfinite = skip_nonfinite or scaler is not None
        self.skipped_steps = 0
        self._scale = GradientScale(scaler)
        self._outcomes: dict[int, StepOutcome] = {}  # by id of the optimizer: its last step
        unit_list, specs = partition(module, placement, optimized, units, bucket_size_mb, persistence_numel)
        check_initialized(specs)
        check_same(specs, placement.mesh.world)
        self._steps_to_check = check_steps
        placement.mesh.check(check_steps > 0)
        convert_buffers(module, placement)
        self._map = BucketMap(module, specs, placement)  # masters are made here, before anything is cast
        self._reducer = Reducer(self.buckets, placement.sharding)
        self._updaters: dict[int, Updater] = {}  # by id of the optimizer
        self._admitted: dict[int, list[int]] = {}  # by id of the optimizer: ids of the parameters in its groups
        self._prepared: dict[int, list[int]] = {}  # the part of it that updaters have seen
        self._clip: dict[int, float] = {}  # by id of the optimizer: factor that clipping asked for
        self._stats: dict[int, GradientStats] | None = None
        self._norms: dict[int, float] = {}  # by id of the optimizer: the norm before anything was clipped
        self._clamped = False  # gradients were changed since the norm in `_stats` was taken
        self._optimizer_handles: list[RemovableHandle] = []
        self._prefetcher = Prefetcher([self._map.own(unit) for unit in unit_list], max_live_numel)
        self._gradient_hooks = GradientHooks(self._map, self._on_gradient)
        self._refresh_hooks: list[Handle] = []
        self._unshard_hooks: list[UnshardHooks] = []
        if placement.sharding.shard_params:
            self._unshard_hooks = install_unshard_hooks(self._map, unit_list, self._prefetcher.gather, self._end_unit)
        else:
            self._refresh_hooks = install_refresh_hooks(self._map, unit_list)
        for submodule in module.modules():
            take_over_module(submodule, self)
        self.number = next(_NUMBERS)
        _ENGINES.add(self)

    # ----------------------------------------------------------------------------------------- forward and backward

    @contextlib.contextmanager
    def forward_context(self) -> Iterator[None]:
        """Around one forward pass of the module: the root's parameters are whole inside.

        With gradients enabled they stay whole until the flush after backward, else they are freed at the end.
        """
        for bucket in self._map.root:
            bucket.unshard()
        self._prefetcher.begin_pass()
        try:
            yield
        finally:
            if not torch.is_grad_enabled():
                if self._prefetcher.has_gathered:  # on all ranks: as good as a step
                    self._count_checked()
                self._reshard()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Around the backward of every micro-batch but the last of a step."""
        return self._reducer.no_sync()

    def scale_loss(self, loss: Tensor) -> Tensor:
        """``loss`` times the loss scale, for backward; at least fp32."""
        self._adopt_scale()
        return self._scale.multiply(loss)

    def _adopt_scale(self) -> None:
        """Before a backward: everything held and everything to come has the scaler's current scale."""
        if (factor := self._scale.adopt()) != 1.0:
            for bucket in self.buckets:
                bucket.scale_gradients(factor)

    @without_freed_checks
    def begin_backward(self, eager: bool = True) -> None:
        """Before the outermost backward.

        Args:
            eager: reduce buckets while backward goes on; ``False`` leaves all to :meth:`flush`.
        """
        self._admit_parameters()
        self._gradient_hooks.come_last()
        for updater in self._updaters.values():
            self._fold_clipping(updater.optimizer)  # gradients that are not cleared stay clipped, as in torch
        self._adopt_scale()
        self._scale.begin_backward()
        self._stats = None
        self._norms = {}
        self._clamped = False
        self._reducer.begin(eager)

    def _on_gradient(self, number: int, index: int) -> None:
        """The gradient of parameter ``index`` of a bucket has been accumulated."""
        if not self._reducer.in_backward:  # `loss.backward()` by user code: reduced when it steps
            self._scale.check_loss()
            self.begin_backward(eager=False)
        self._reducer.mark_ready(self.buckets[number], index)

    def _end_unit(self, buckets: Sequence[Bucket]) -> None:
        """Stage 3: all backward of a unit has run."""
        self._reducer.end_unit(buckets)
        for bucket in buckets:
            bucket.reshard()

    @without_freed_checks
    def flush(self) -> None:
        """After the outermost backward: reduce what is left, on every rank, used or not, and free what was gathered.

        A rank that ran no backward in a micro-batch in which others did must call it all the same.
        """
        if not self._reducer.in_backward:
            self.begin_backward(eager=False)
        self._reducer.flush()
        self._scale.end_backward()
        for hooks in self._unshard_hooks:
            hooks.end_backward()
        self._reshard()

    def _reshard(self) -> None:
        self._prefetcher.end_pass()
        for bucket in self.buckets:
            bucket.reshard()

    # --------------------------------------------------------------------------------------------------- optimizers

    def attach(self, updaters: Sequence[Updater]) -> None:
        """Drive these updaters' optimizers: their ``step`` and ``zero_grad`` act on shards from now on.

        The optimizer objects, their groups and parameters stay what they are. Replaces those attached before; an
        optimizer that is among these already goes on with its state.

        Raises:
            ValueError: where an optimizer holds a parameter that the module does not.
        """
        before = self._updaters
        self.detach()
        self.settle()
        self._updaters = {id(u.optimizer): before.get(id(u.optimizer), u) for u in updaters}
        self._admit_parameters()
        for updater in self._updaters.values():
            self._prepare(updater)
            updater.adopt(self)
            hide_state(updater.optimizer)
            self._optimizer_handles += take_over_optimizer(updater.optimizer, self)
        self.zero_grad(p for b in self.buckets for p in b.parameters)

    def _admit_parameters(self) -> None:
        """Make ready what has joined an optimizer's groups."""
        for key, updater in self._updaters.items():
            parameters = parameters_of(updater.optimizer)
            admitted = list(map(id, parameters))
            if self._admitted.get(key) == admitted:
                continue
            for parameter in parameters:
                bucket = self._map.holder(parameter)
                if bucket is None:
                    raise ValueError(f"{type(updater.optimizer).__name__} holds {self._why_foreign(parameter)}")
                bucket.optimize()
            self._admitted[key] = admitted

    def _why_foreign(self, parameter: Parameter) -> str:
        """Why no bucket holds ``parameter``, and what to do."""
        module = type(self.module).__name__
        for name, own in self.module.named_parameters():
            if own is parameter:
                return (
                    f"{name!r}, which joined {module} after its parameters were sharded; make it in `__init__` or "
                    "`configure_model`, and freeze it until it is needed"
                )
        return (
            f"a parameter of shape {tuple(parameter.shape)} that is not registered in {module}; give optimizers the "
            "module's parameters"
        )

    def _prepare(self, updater: Updater) -> None:
        """Let an updater see the buckets of what was admitted to its optimizer since the last time.

        Not between forward and backward: it may change parameters.
        """
        key = id(updater.optimizer)
        if self._prepared.get(key) != self._admitted[key]:
            admitted = set(self._admitted[key])
            for bucket in self._map.holders(p for p in parameters_of(updater.optimizer) if id(p) in admitted):
                updater.prepare(bucket)
            self._prepared[key] = self._admitted[key]

    def detach(self) -> None:
        """Give the attached optimizers their own methods back."""
        for updater in self._updaters.values():
            give_back_optimizer(updater.optimizer)
        for handle in self._optimizer_handles:
            handle.remove()
        self._updaters, self._admitted, self._prepared, self._clip, self._outcomes = {}, {}, {}, {}, {}
        self._optimizer_handles = []
        self._stats = None

    @property
    def updaters(self) -> list[Updater]:
        """Those attached, in the order given."""
        return list(self._updaters.values())

    def adopt_state(self, optimizer: Optimizer) -> None:
        """Move state that user code loaded or wrote into an attached optimizer into shards."""
        updater = self._updaters[id(optimizer)]
        if state_was_replaced(optimizer):
            updater.clear()
        updater.adopt(self)
        hide_state(optimizer)

    @without_freed_checks
    def zero_grad(self, parameters: Iterable[Parameter], set_to_none: bool = True) -> None:
        """Clear gradients of ``parameters``, whole ones and owned slices.

        Args:
            parameters: any; those that are not the module's are cleared as torch does.
            set_to_none: as in torch: ``False`` makes them zeros, which optimizers still apply.
        """
        self._stats = None
        by_bucket: dict[int, list[int]] = {}
        cleared = set()
        for parameter in parameters:
            parameter.grad = None
            cleared.add(id(parameter))
            if (bucket := self._map.holder(parameter)) is not None:
                by_bucket.setdefault(id(bucket), []).append(bucket.index[id(parameter)])
        for bucket in self.buckets:
            if indices := by_bucket.get(id(bucket)):
                bucket.clear_gradients(indices, keep_used=not set_to_none)
        for key, updater in self._updaters.items():
            # What is left of its gradients stays clipped.
            if cleared.issuperset(map(id, parameters_of(updater.optimizer))):
                self._clip.pop(key, None)
                self._norms.pop(key, None)

    @without_freed_checks
    def stats(self, optimizer: Optimizer) -> GradientStats:
        """Norm, overflow and used parameters of the averaged gradients of ``optimizer``. Collective, then cached."""
        return self._all_stats()[id(optimizer)]

    def _all_stats(self) -> dict[int, GradientStats]:
        if self._reducer.in_backward:
            self.flush()
        if self._stats is None:
            self._admit_parameters()
            self._stats = self._reduce_stats()
            self._norms = {key: stats.norm for key, stats in self._stats.items()} | self._norms
        return self._stats

    @torch.no_grad()
    @without_freed_checks
    def full_grad(self, parameter: Parameter) -> Tensor | None:
        """The whole averaged gradient of one of the module's parameters; see :func:`full_grad`. Collective."""
        (bucket,) = self._map.holders([parameter])
        if not any(id(parameter) in stats.used for stats in self._all_stats().values()):
            return None
        values = bucket.gradients.read(0, bucket.layout.shard_numel)
        # Clipping has widened the slices of some ranks only.
        full = bucket.gather_full(values.to(bucket.placement.sum_dtype(values.dtype)))
        owners = [key for key, admitted in self._admitted.items() if id(parameter) in admitted]
        clip = math.prod(self._clip.get(key, 1.0) for key in owners)
        gradient = bucket.view(full, bucket.index[id(parameter)])
        return gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True).mul_(clip / self._scale.value)

    @torch.no_grad()
    def full_param(self, parameter: Parameter) -> Tensor:
        """One of the module's parameters, whole and at full precision. Collective."""
        self._absorb_edits()
        (bucket,) = self._map.holders([parameter])
        full = bucket.gather_full(bucket.master.read(0, bucket.layout.shard_numel))
        return bucket.view(full, bucket.index[id(parameter)]).clone()

    def _reduce_stats(self) -> dict[int, GradientStats]:
        """The one small all-reduce of a step: norm² per optimizer, which parameters were used, what was left over.

        Left over are gradients that arrived after their bucket was reduced (a parameter's hook fires several times
        under reentrant checkpointing) or that user code assigned. Any rank may have some, so all reduce them.
        """
        squares = self._squares()
        used = [float(received) for bucket in self.buckets for received in bucket.received]
        left = [float(bucket.optimized and bucket.has_gradient()) for bucket in self.buckets]
        flags = torch.tensor(used + left, dtype=torch.float64, device=self.placement.device)
        mesh = self.placement.mesh
        notes = torch.cat([mesh.digests().to(flags.device), squares, flags])
        digests, values = _split(mesh.world.all_reduce_(notes, "sum up norms and flags").tolist(), 2 * mesh.world.size)
        mesh.check_digests(digests)
        left_anywhere = values[len(squares) + len(used) :]
        if any(left_anywhere):
            for bucket, count in zip(self.buckets, left_anywhere, strict=True):
                if count:
                    bucket.reduce(last=True)
            return self._reduce_stats()
        parameters = [p for bucket in self.buckets for p in bucket.parameters]
        used_ids = frozenset(id(p) for p, count in zip(parameters, values[len(squares) :], strict=False) if count)
        return {
            key: GradientStats(math.sqrt(square) / self._scale.value, not math.isfinite(square), used_ids)
            for key, square in zip(self._updaters, values, strict=False)
        }

    def _squares(self) -> Tensor:
        """This rank's part of the squared gradient norm of each optimizer; float64, on the device."""
        owners: dict[int, tuple[int, ...]] = {}
        for number, updater in enumerate(self._updaters.values()):
            for parameter in parameters_of(updater.optimizer):
                owners[id(parameter)] = (*owners.get(id(parameter), ()), number)
        squares = [torch.zeros((), dtype=torch.float64, device=self.placement.optimizer_store.device)]
        squares *= len(self._updaters)
        # Replicas hold the same slices: one of them speaks for all.
        if self.placement.mesh.replica.rank == 0:
            for bucket in self.buckets:
                if not bucket.gradients.empty:
                    _add_squares(bucket, owners, squares)
        empty = torch.zeros(0, dtype=torch.float64)
        return (torch.stack(squares) if squares else empty).to(self.placement.device)

    def grad_norm(self, optimizer: Optimizer) -> float:
        """The global L2 norm of the averaged gradients of ``optimizer`` as they are now, clipped or not. Collective."""
        if self._clamped:
            self._stats = None
            self._clamped = False
        return self.stats(optimizer).norm * self._clip.get(id(optimizer), 1.0)

    def clip_grad_norm_(self, optimizer: Optimizer, max_norm: float) -> float:
        """Scale the gradients of ``optimizer`` to a global norm of at most ``max_norm``; returns the norm before.

        As :func:`torch.nn.utils.clip_grad_norm_`, over all shards. The factor is applied inside the update. Collective.
        """
        norm = self.grad_norm(optimizer)
        # A norm that is not finite is the business of `skip_nonfinite`.
        factor = min(1.0, max_norm / (norm + 1e-6)) if math.isfinite(norm) else 1.0
        self._clip[id(optimizer)] = factor * self._clip.get(id(optimizer), 1.0)
        others = [ids for key, ids in self._admitted.items() if key != id(optimizer)]
        if any(not set(ids).isdisjoint(self._admitted[id(optimizer)]) for ids in others):
            self._fold_clipping(optimizer)  # they share gradients: the others see them clipped
            self._clamped = True
        return norm

    def clip_grad_value_(self, optimizer: Optimizer, clip_value: float) -> None:
        """Clamp every averaged gradient of ``optimizer`` to ``[-clip_value, clip_value]``, where it is. Collective."""
        if self.stats(optimizer).found_inf and self.skip_nonfinite:
            return  # the step will be skipped: a clamp must not hide why
        self._fold_clipping(optimizer)
        for gradients in self._owned_gradients(optimizer):
            bound = min(clip_value * self._scale.value, torch.finfo(gradients.dtype).max)
            gradients.clamp_(-bound, bound)
        self._clamped = True

    def _fold_clipping(self, optimizer: Optimizer) -> None:
        """Apply the factor of :meth:`clip_grad_norm_` to the gradients, before more happens to them than a step."""
        scale = self._clip.pop(id(optimizer), 1.0)
        if scale != 1.0:
            for gradients in self._owned_gradients(optimizer):
                gradients.mul_(scale)

    def _owned_gradients(self, optimizer: Optimizer) -> Iterator[Tensor]:
        """Views of the owned slices that hold gradients of ``optimizer``'s parameters, to be changed in place.

        In fp32 at least: 16 bits would round what is done to them, and the update itself does not.
        """
        for bucket, segments in self._map.segments_of(parameters_of(optimizer)):
            if not bucket.gradients.empty:
                bucket.gradients.widen()
                for run in runs(segments, lambda _: True):
                    yield bucket.gradients.read(run.start, run.stop)

    def step(self, optimizer: Optimizer) -> bool:
        """Update the shards of ``optimizer``'s parameters; returns False where all ranks skip. Collective.

        Hyperparameters are copied before anything is updated, so that a scheduler may change them right after. The
        optimizer's own step hooks run around the update, and not at all when it is skipped.

        Raises:
            LossScaleError: gradients overflow at the smallest loss scale.
        """
        stats = self.stats(optimizer)
        self._count_checked()
        optimizer._opt_called = True  # type: ignore[attr-defined]  # what schedulers ask for
        skipped = stats.found_inf and self.skip_nonfinite
        self._outcomes[id(optimizer)] = StepOutcome(self._norms[id(optimizer)], skipped)
        if skipped:
            self._skip(optimizer)
        else:
            update = Optimizer.profile_hook_step(lambda optimizer: self._update(optimizer, stats.used))
            update(optimizer)
            self._scale.judge(found_inf=False)
        return not skipped

    def _count_checked(self) -> None:
        self._steps_to_check -= 1
        if self._steps_to_check == 0:
            self.placement.mesh.check(False)

    @torch.no_grad()
    @without_freed_checks
    def _update(self, optimizer: Optimizer, used_anywhere: frozenset[int]) -> None:
        self._absorb_edits()
        if state_was_edited(optimizer):
            self.adopt_state(optimizer)
        # The scale of the gradients, whatever the scaler's is by now.
        scale = self._clip.get(id(optimizer), 1.0) / self._scale.value
        updater, hyperparameters = self._updaters[id(optimizer)], _snapshot(optimizer)
        updater.check({id(group): group for group in hyperparameters.values()}.values())
        self._prepare(updater)
        used = [p for p in parameters_of(optimizer) if id(p) in used_anywhere]
        for bucket, segments in self._map.segments_of(used):
            groups = {i: hyperparameters[id(p)] for i, p in enumerate(bucket.parameters) if id(p) in hyperparameters}
            updater.update(bucket, segments, groups, scale)
        used_ids = set(map(id, used))
        for bucket in self.buckets:
            # Stale on all ranks or on none, also where this rank owns no segment of it.
            if indices := [i for i, p in enumerate(bucket.parameters) if id(p) in used_ids]:
                bucket.mark_updated(indices)
        if optimizer._optimizer_step_post_hooks or _global_optimizer_post_hooks:
            self.settle()  # they may read parameters

    def _skip(self, optimizer: Optimizer) -> None:
        self.skipped_steps += 1
        try:
            falls = self._scale.judge(found_inf=True)
        except LossScaleError as error:
            names = self._nonfinite_names(optimizer)
            raise LossScaleError(f"{error}. Not finite: the gradient of {names}") from None
        if falls:
            self._warn(
                f"gradients overflowed: the loss scale falls from {self._scale.value:g} to {self._scale.next:g} "
                f"(steps skipped so far: {self.skipped_steps})"
            )
        # Where no lower scale can help, the data or the model is at fault. Ever more rarely: it may be every step.
        elif self._scale.at_minimum and self.skipped_steps & (self.skipped_steps - 1) == 0:
            self._warn(
                f"skipped a step of {type(optimizer).__name__} on all ranks: inf or nan in the gradient of "
                f"{self._nonfinite_names(optimizer)} (steps skipped so far: {self.skipped_steps}; the next warning "
                "comes when they are twice as many)"
            )
        self.zero_grad(parameters_of(optimizer))

    def _warn(self, message: str) -> None:
        if self.placement.mesh.world.rank == 0:
            warnings.warn(message, stacklevel=5)

    def _nonfinite_names(self, optimizer: Optimizer, limit: int = 3) -> str:
        """Names of the first parameters, in forward order, with a gradient that is not finite on any rank. Collective.

        It costs an all-reduce of one number per parameter, and only where a message is made of it.
        """
        flags = {id(p): 0.0 for bucket in self.buckets for p in bucket.parameters}
        for bucket, segments in self._map.segments_of(parameters_of(optimizer)):
            if not bucket.gradients.empty:
                for s in segments:
                    finite = bool(bucket.gradients.read(s.start, s.stop).isfinite().all())
                    flags[id(bucket.parameters[s.param])] += not finite
        vector = torch.tensor([*flags.values()], dtype=torch.float64, device=self.placement.device)
        counts = self.placement.mesh.world.all_reduce_(vector, "name what is not finite").tolist()
        names = [name for bucket in self.buckets for name in bucket.names]
        found = [name for name, count in zip(names, counts, strict=True) if count]
        return ", ".join(found[:limit]) + (f" and {len(found) - limit} more" if len(found) > limit else "")

    @property
    def loss_scale(self) -> float:
        """The factor of the next :meth:`scale_loss`; 1 without a scaler."""
        return self._scale.next

    def last_step(self, optimizer: Optimizer) -> StepOutcome | None:
        """What became of the last step of ``optimizer``; ``None`` before the first one since it was attached."""
        return self._outcomes.get(id(optimizer))

    # -------------------------------------------------------------------------------------------------- consistency

    def settle(self) -> None:
        """Finish updates and gathers, take over edits by user code: shards and whole parameters agree. Collective."""
        self._absorb_edits()
        for bucket in self.buckets:
            if bucket.state is BucketState.STALE:
                bucket.unshard()

    def sync_buffers(self) -> None:
        """Give every rank rank 0's buffers (statistics of BatchNorm, which each rank gathers alone). Collective."""
        broadcast_buffers(self.module, self.placement.mesh.world)

    def _absorb_edits(self) -> None:
        gathered = [bucket for bucket in self.buckets if bucket.state is BucketState.GATHERED]
        asked = [(bucket, edit) for bucket in gathered if (edit := bucket.hidden_edit()) is not None]
        answers = torch.stack([edit for _, edit in asked]).tolist() if asked else []  # one wait for the device
        hidden = {id(bucket) for (bucket, _), answer in zip(asked, answers, strict=True) if answer}
        for bucket in gathered:
            bucket.absorb_edits(everything=id(bucket) in hidden)

    @contextlib.contextmanager
    def gathered(
        self, parameters: Iterable[Parameter], writeback: bool = False, full_precision: bool = False
    ) -> Iterator[None]:
        """Hold ``parameters`` whole inside the context, on all ranks. Collective, on entry and on exit.

        In-place changes that torch's version counter sees are taken over on exit; each rank must make the same.

        Args:
            parameters: some of the module's.
            writeback: take over all values on exit, rank 0's on all ranks, also those written through ``.data``.
            full_precision: show the masters, in their dtype; what is taken over then is not rounded either. At stage 3
                tensors that share memory with the parameters stay valid after the context.
        """
        chosen = self._map.holders(parameters)
        buckets = [bucket for bucket in self.buckets if bucket in chosen]
        for bucket in buckets:
            bucket.pins += 1
            if not full_precision:
                bucket.unshard()
        widened = [bucket for bucket in buckets if full_precision and bucket.widen()]
        try:
            yield
        finally:
            for bucket in widened:
                bucket.narrow(writeback)
            for bucket in buckets:
                bucket.pins -= 1
                if bucket.state is BucketState.GATHERED:
                    bucket.absorb_edits()
                    if writeback:
                        self.placement.mesh.world.broadcast_(bucket.flat, f"write back {bucket.name}")
                        bucket.absorb_edits(everything=True)
                bucket.reshard()

    def release(self) -> None:
        """Undo everything: ordinary parameters at full precision, no hooks, optimizers of their own. Collective."""
        self.settle()
        self.detach()
        for module in self.module.modules():
            give_back_module(module)
        self._gradient_hooks.remove()
        for hooks in (*self._refresh_hooks, *self._unshard_hooks):
            hooks.remove()
        self._map.release()
        self.released = True
        _ENGINES.discard(self)

    @property
    def buckets(self) -> list[Bucket]:
        """In forward order; none after :meth:`release`."""
        return self._map.buckets

    def bucket_of(self, parameter: Tensor) -> Bucket | None:
        """The bucket that holds ``parameter``, or ``None``."""
        return self._map.holder(parameter)

    def holds(self, parameters: Iterable[Parameter]) -> bool:
        """Whether all ``parameters`` are the module's."""
        return all(self._map.holder(p) is not None for p in parameters)


def _split(values: list[float], at: int) -> tuple[list[float], list[float]]:
    return values[:at], values[at:]


_ENGINES: weakref.WeakSet[Engine] = weakref.WeakSet()  # those that hold parameters
_NUMBERS = itertools.count()


def engines() -> list[Engine]:
    """Those that hold parameters, in the order of their making: the same on all ranks."""
    return sorted(_ENGINES, key=lambda engine: engine.number)


def _snapshot(optimizer: Optimizer) -> dict[int, dict[str, Any]]:
    """The hyperparameters of every parameter, by its id; parameters of one group share one copy."""
    snapshot: dict[int, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        frozen = {k: copy.deepcopy(v) for k, v in group.items() if k not in ("params", "param_names")}
        snapshot.update((id(parameter), frozen) for parameter in group["params"])
    return snapshot


def _add_squares(bucket: Bucket, owners: dict[int, tuple[int, ...]], squares: list[Tensor]) -> None:
    """Add the squares of a bucket's owned gradients to the sum of each optimizer, in float64.

    A non-finite element makes the sum non-finite, and squares of finite fp32 elements cannot overflow float64.
    """

    def owners_of(segment: Segment) -> tuple[int, ...] | None:
        return owners.get(id(bucket.parameters[segment.param]))

    for run in runs(bucket.segments, owners_of, gap=bucket.layout.align - 1):
        total = _sum_of_squares(bucket.gradients.read(run.start, run.stop))
        for number in owners_of(run.segments[0]) or ():
            squares[number] = squares[number] + total


def _sum_of_squares(values: Tensor) -> Tensor | float:
    if values.device.type == "cpu" and values.dtype != torch.float64:
        return ops.sum_of_squares(values)
    total = torch.zeros((), dtype=torch.float64, device=values.device)
    for tile in values.split(_NORM_TILE):
        wide = tile.double()
        total += torch.dot(wide, wide)
    return total
