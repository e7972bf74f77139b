"""The engine: drives buckets through forward, backward and step, in one order on all ranks.

    forward    stage 3: each unit gathers before and frees after (``hooks.py``), the next one ahead (``prefetch.py``)
    backward   gradients are reduced in one order on all ranks (``reducer.py``)
    flush      reduces the gradients that are left after the outermost backward; those of unused parameters are zeros
    step       makes one small all-reduce, after which every rank knows norm, overflow and used parameters
               (``clipping.py``), and begins to update its shards (``attached.py``), beside the next forward perhaps
    end_step   gathers parameters that the updates made stale, or leaves that to the next forward (``refresh.py``)
    settle     waits for all updates and gathers

Every rank issues the same collectives in the same order, whichever of its parameters were used.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_zero.engine.activations import ActivationLimits, make_activations
from lightning_zero.engine.registry import Registry
from lightning_zero.engine.shadow import Shadow
from lightning_zero.sharding.bucket import Bucket
from lightning_zero.sharding.bucket_map import BucketMap
from lightning_zero.sharding.buffers import BufferWatch, convert_buffers
from lightning_zero.sharding.compiled import Handle
from lightning_zero.sharding.freed import without_freed_checks
from lightning_zero.sharding.gradients import BucketGradients
from lightning_zero.sharding.held import answer_for
from lightning_zero.sharding.hooks import GradientHooks, UnshardHooks, install_refresh_hooks, install_unshard_hooks
from lightning_zero.sharding.partition import check_compiled, check_exact, check_initialized, check_same, partition
from lightning_zero.sharding.placement import BucketPlacement
from lightning_zero.sharding.prefetch import Prefetcher
from lightning_zero.sharding.reducer import Reducer
from lightning_zero.sharding.root import Root
from lightning_zero.storage import TensorStore
from lightning_zero.storage.timers import Phase, Timers, timed
from lightning_zero.torch_private import has_post_step_hooks, note_step
from lightning_zero.update.attached import AttachedOptimizers, attach_module, detach_module, parameters_of
from lightning_zero.update.clipping import GradientClipping, GradientStats
from lightning_zero.update.gradient_scale import GradientScale, SharedScaler
from lightning_zero.update.in_backward import UpdatesInBackward
from lightning_zero.update.loss_scaler import LossScaler
from lightning_zero.update.outcomes import StepOutcome, StepOutcomes
from lightning_zero.update.shell import StepCall
from lightning_zero.update.updaters import Updater
from lightning_zero.update.visible_gradients import VisibleGradients


class Engine:
    """Shards a module's parameters, gradients and optimizer state over the ranks of a mesh.

    It is the one interface of the floors below. Its many public methods are the events of a training, and ways to read
    and write sharded tensors. Each of them calls the object that does the work.

    Attributes:
        module, placement: as they were given.
        released: whether :meth:`release` was called; the engine holds nothing then.
        skip_nonfinite: whether steps with a gradient that is not finite are skipped.
        outcomes: of the steps of the attached optimizers.
        number, shared_number: of the engines of this process, and of its mesh, in the order of their making.
        shows_sums: whether user code sees averaged sums before the last micro-batch, which takes a small all-reduce.
        ends_steps: whether each step calls :meth:`end_step`, since its caller is user code that will not.
        in_backward: begins updates before their step, and knows whether a step has left torn weights.
        shadows: the shadows of :meth:`make_shadow` that are still in use, by their number.

    Args:
        module: fully initialized on every rank; rank 0's parameters and buffers are broadcast. Parameters that
            :func:`~lightning_zero.sharding.sharded_init.sharded_init` left in shards are unsharded one at a time at
            stage 3.
        placement: process groups, policies, device and stores.
        optimized: parameters that optimizers will update (others may join later); ``None``: all with a gradient.
        units: see :func:`~lightning_zero.sharding.partition.find_units`.
        bucket_size_mb: size, in 2^20 bytes, up to which small units share a bucket at stages 0-2.
        scaler: chooses the factor of :meth:`scale_loss` for all optimizers; ``None``: no scaling. See ``SharedScaler``.
        skip_nonfinite: skip the step, on all ranks, when a gradient is not finite; with a scaler that always happens.
        max_consecutive_skips: see :class:`~lightning_zero.update.outcomes.StepOutcomes`.
        persistence_numel: parameters with at most so many elements stay unsharded at stage 3.
        max_live_numel: units are not gathered ahead beyond so many elements in unsharded units at stage 3.
        prefetch_mb: see :class:`~lightning_zero.sharding.prefetch.Prefetcher`.
        check_steps: number of first optimizer steps in which ranks compare notes before each collective.
        detect_data_edits: find what user code wrote through ``parameter.data`` outside of ``gathered`` at stages 0 to
            2, at the cost of two passes over the shard and a wait for the device in every step.
        whole: parameters that must each lie whole on one rank, see :func:`~lightning_zero.update.kept_whole`.
        update_in_backward: see :mod:`lightning_zero.update.in_backward`; not with a scaler or ``skip_nonfinite``.
        activations: which tensors that autograd saves in forward rest in host memory until backward; ``None``: none.

    Raises:
        CollectiveError: where the ranks hold different modules.
        ValueError: values that are needed here were rounded, or a graph contains units at stage 3.
    """

    def __init__(
        self,
        module: nn.Module,
        placement: BucketPlacement,
        optimized: Iterable[Parameter] | None = None,
        units: Sequence[str | type[nn.Module]] | None = None,
        bucket_size_mb: float = 25.0,
        scaler: LossScaler | SharedScaler | None = None,
        skip_nonfinite: bool = True,
        max_consecutive_skips: int | None = None,
        persistence_numel: int = 0,
        max_live_numel: int | None = None,
        prefetch_mb: float = 0.0,
        check_steps: int = 10,
        detect_data_edits: bool = False,
        whole: Iterable[Parameter] = (),
        update_in_backward: bool = False,
        activations: ActivationLimits | None = None,
    ) -> None:
        self.module, self.placement = module, placement
        self.released = self.shows_sums = self.ends_steps = False
        self.skip_nonfinite = skip_nonfinite or scaler is not None
        self._scale = GradientScale(scaler)
        self.outcomes = StepOutcomes(self._scale, max_consecutive_skips, placement.mesh.world.rank == 0)
        self.shadows: weakref.WeakValueDictionary[int, Shadow] = weakref.WeakValueDictionary()
        self._shadow_numbers = itertools.count()
        rest = bucket_size_mb, persistence_numel, None, whole
        unit_list, specs = partition(module, placement, optimized, units, *rest)
        check_compiled(module, unit_list if placement.sharding.shard_params else ())
        check_initialized(specs)
        check_exact(specs, placement)
        check_same(specs, placement.mesh.world)
        self._steps_to_check = check_steps
        placement.mesh.check(check_steps > 0)
        self._buffer_watch = BufferWatch(module, placement, convert_buffers(module, placement), check_steps)
        self._map = BucketMap(module, specs, placement, detect_data_edits)  # makes masters, before anything is cast
        self._reducer = Reducer(self._map.gradients, placement.sharding)
        self._optimizers = AttachedOptimizers(self._map)
        self._clipping = GradientClipping(self._map, self._optimizers, self._scale, placement, self._buffer_watch)
        self.in_backward = UpdatesInBackward(self._map, self._optimizers, self._clipping, update_in_backward)
        self._visible = VisibleGradients(self._map, self._reducer, self._clipping, self.zero_grad)
        answer_for((p for bucket in self.buckets for p in bucket.parameters), self._visible)
        self._root = Root(self._map)
        self.prefetcher = Prefetcher([self._map.own(unit) for unit in unit_list], max_live_numel, prefetch_mb)
        self._activations = make_activations(placement.device, placement.executor, activations, self._map.tensors)
        self._gradient_hooks = GradientHooks(self._map, self._on_gradient)
        self._refresh_hooks, self._unshard_hooks = list[Handle](), list[UnshardHooks]()
        if placement.sharding.shard_params:
            self._unshard_hooks = install_unshard_hooks(self._map, unit_list, self.prefetcher.gather, self._end_unit)
        else:
            self._refresh_hooks = install_refresh_hooks(self._map, unit_list)
        for submodule in module.modules():
            attach_module(submodule, self)
        self.number, self.shared_number = ENGINES.add(self), next(placement.mesh.engine_numbers)

    @property
    def timers(self) -> Timers:
        """Timers of the phases of a step, while they run."""
        return self.placement.mesh.timers

    # ----------------------------------------------------------------------------------------- forward and backward

    @contextlib.contextmanager
    def forward_context(self) -> Iterator[None]:
        """Surrounds one forward pass of the module; see :class:`Root` for the parameters outside all units."""
        self.in_backward.check()
        with self._map.refresher.reading(), self._activations.saving(), self._root.forward():
            self.prefetcher.begin_pass()
            try:
                with self.timers.phase(Phase.FORWARD), UnshardHooks.forward(self._unshard_hooks):
                    yield
            finally:
                if not torch.is_grad_enabled():
                    counts = self.prefetcher.has_gathered  # on all ranks: as good as a step
                    self._reshard()  # first: it ends gathers, which all ranks check or none
                    if counts:
                        self._count_checked()
        self._map.refresher.finish()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Surrounds the backward of every micro-batch but the last of a step."""
        return self._reducer.no_sync()

    def scale_loss(self, loss: Tensor) -> Tensor:
        """``loss`` times the loss scale, for backward; at least fp32."""
        self._adopt_scale()
        return self._scale.multiply(loss)

    def _adopt_scale(self) -> None:
        """Bring all held gradients to the scaler's current scale, which new ones will have. Precedes a backward."""
        if (factor := self._scale.adopt()) != 1.0:
            for gradients in self._map.gradients:
                gradients.scale(factor)

    @without_freed_checks
    def begin_backward(self, eager: bool = True) -> None:
        """Prepare for the outermost backward, which follows.

        Args:
            eager: reduce buckets while backward goes on; ``False`` leaves all to :meth:`flush`.
        """
        self.admit()
        self._gradient_hooks.come_last()
        self._clipping.begin_backward()
        self._adopt_scale()
        self._scale.begin_backward()
        self._reducer.begin(eager)
        self.in_backward.begin(eager and self._reducer.last_micro_batch)

    def _on_gradient(self, number: int, index: int) -> None:
        """Called when the gradient of parameter ``index`` of a bucket has been accumulated."""
        if not self._reducer.in_backward:  # `loss.backward()` by user code: reduced when it steps
            self._scale.check_loss()
            self.begin_backward(eager=False)
        self.in_backward.check_arrival(gradients := self._map.gradients[number], index)
        self.in_backward.offer(self._reducer.mark_ready(gradients, index))

    def _end_unit(self, buckets: Sequence[Bucket]) -> None:
        """Called at stage 3 when all backward of a unit has run."""
        complete = self._reducer.end_unit([self._map.gradients_of(bucket) for bucket in buckets])
        for bucket in buckets:
            bucket.reshard()
        self.in_backward.offer(complete)

    @without_freed_checks
    def flush(self) -> None:
        """Reduce the gradients that are left, used or not, and free gathered parameters, after the outermost backward.

        All ranks call it after every micro-batch, also one that has run no backward in it.
        """
        if not self._reducer.in_backward:
            self.begin_backward(eager=False)
        self._reducer.flush()
        self._scale.end_backward()
        self._activations.end_backward()
        self._reshard()
        if self._optimizers.updaters and (self._reducer.last_micro_batch or self.shows_sums):
            self._measure()  # the step would do it; before that, user code may ask for gradients

    def _reshard(self) -> None:
        for hooks in self._unshard_hooks:
            hooks.end_backward()
        self.prefetcher.end_pass()
        self._root.end_backward()

    # --------------------------------------------------------------------------------------------------- optimizers

    def attach(self, updaters: Sequence[Updater]) -> None:
        """Drive these updaters' optimizers: their ``step`` and ``zero_grad`` act on shards from now on.

        The optimizer objects, their groups and parameters stay what they are. Replaces those attached before; an
        optimizer that is among these already goes on with its state.

        Raises:
            ValueError: where an optimizer holds a parameter that the module does not, or a parameter has lost digits.
        """
        self.begin_training()
        self._map.check_exact()
        self.outcomes.forget()
        self._clipping.forget()
        self._optimizers.attach(updaters, self)
        self.in_backward.check_optimizers()
        self.zero_grad(p for b in self.buckets for p in b.parameters)

    def admit(self) -> None:
        """Begin to optimize parameters that have joined the attached optimizers. The same call on all ranks."""
        self._optimizers.admit()

    def begin_training(self) -> None:
        """Make the masters that were left out, of what was not cast or is loaded next. The same call on all ranks."""
        self.placement = self._map.begin_to_train()

    @property
    def updaters(self) -> list[Updater]:
        """The attached updaters, in the order given."""
        return self._optimizers.updaters

    def adopt_state(self, optimizer: Optimizer) -> None:
        """Move state that user code loaded or wrote into an attached optimizer into shards."""
        self._optimizers.adopt_state(optimizer)

    @without_freed_checks
    def zero_grad(self, parameters: Iterable[Parameter], set_to_none: bool = True) -> None:
        """Clear gradients of ``parameters``, unsharded and sharded.

        Args:
            parameters: any; those that are not the module's are cleared as torch does.
            set_to_none: as in torch: ``False`` makes them zeros, which optimizers still apply.
        """
        self._clipping.clear(parameters, set_to_none)

    @without_freed_checks
    def stats(self, optimizer: Optimizer) -> GradientStats:
        """Norm, overflow and used parameters of the averaged gradients of ``optimizer``. Collective, then cached."""
        self._measure()
        return self._clipping.stats(optimizer)

    def _measure(self, clamped: bool = False) -> None:
        """Reduce what is not reduced yet, and make norms known; see :meth:`GradientClipping.measure`. Collective."""
        if self._reducer.in_backward:  # user code began it by `loss.backward()`
            self._reducer.check_ended()
            self.flush()
        while left_over := self._clipping.measure(clamped):
            self.in_backward.check_left_over(left_over)
            self._reducer.reduce_left_over(left_over)

    @torch.no_grad()
    @without_freed_checks
    def full_grad(self, parameter: Parameter) -> Tensor | None:
        """The full averaged gradient of one of the module's parameters; see :func:`full_grad`. Collective."""
        self._measure()
        return self._clipping.full(parameter)

    @torch.no_grad()
    def full_param(self, parameter: Parameter) -> Tensor:
        """The full values of one of the module's parameters, at full precision. Collective."""
        self.in_backward.check_together()
        return self._map.full(parameter)

    @without_freed_checks
    def grad_norm(self, optimizer: Optimizer) -> float:
        """The global L2 norm of the averaged gradients of ``optimizer`` as they are now, clipped or not. Collective."""
        self._measure(clamped=True)
        return self._clipping.norm(optimizer)

    @without_freed_checks
    def clip_grad_norm_(self, optimizer: Optimizer, max_norm: float) -> float:
        """Scale the gradients of ``optimizer`` to a global norm of at most ``max_norm``; returns the norm before.

        As :func:`torch.nn.utils.clip_grad_norm_`, over all shards. The factor is applied inside the update. Collective.
        """
        self.in_backward.refuse_clipping()
        self._measure(clamped=True)
        return self._clipping.clip_norm_(optimizer, max_norm)

    @without_freed_checks
    def clip_grad_value_(self, optimizer: Optimizer, clip_value: float) -> None:
        """Clamp every averaged gradient of ``optimizer`` to ``[-clip_value, clip_value]``, where it is. Collective."""
        self.in_backward.refuse_clipping()
        if self.stats(optimizer).found_inf and self.skip_nonfinite:
            return  # the step will be skipped: a clamp must not hide why
        self._clipping.clip_value_(optimizer, clip_value)

    @timed(Phase.OPTIMIZER)
    def step(self, optimizer: Optimizer, call: StepCall | None = None) -> bool:
        """Update the shards of ``optimizer``'s parameters; returns False where all ranks skip. Collective.

        Hyperparameters are copied before anything is updated, so that a scheduler may change them right after. The
        optimizer's own step hooks run around the update, and not at all when it is skipped.

        Args:
            optimizer: one of those attached.
            call: of its ``step``; ``None``: one without arguments.

        Raises:
            LossScaleError: gradients overflow at the smallest loss scale.
            SkippedStepsError: as many steps in a row were skipped as may be.
        """
        stats = self.stats(optimizer)
        self._count_checked()
        self._buffer_watch.count_step()  # passes without gradients are no steps here
        self.placement.mesh.note("a step")  # which communicates no more: what it needs to know came with the flush
        note_step(optimizer)
        norm = self._clipping.unclipped_norm(optimizer)
        if skipped := stats.found_inf and self.skip_nonfinite:
            self.outcomes.skip(optimizer, norm, lambda: self._clipping.nonfinite_names(optimizer))
            self.zero_grad(self._optimizers.own_parameters(optimizer))
        else:
            self.outcomes.take(optimizer, norm)
            Optimizer.profile_hook_step(lambda own: self._update(own, call or StepCall(own)))(optimizer)
            self._scale.judge(found_inf=False)
        return not skipped

    def _count_checked(self) -> None:
        self._steps_to_check -= 1
        if self._steps_to_check == 0:
            self.placement.mesh.check(False)

    @torch.no_grad()
    @without_freed_checks
    def _update(self, optimizer: Optimizer, call: StepCall) -> None:
        used_anywhere = self.stats(optimizer).used  # again: step hooks may have dropped gradients, or made some
        self._map.refresher.finish()
        self._map.absorb_edits()
        used = [p for p in parameters_of(optimizer) if id(p) in used_anywhere]
        with self.in_backward.completing(optimizer, call) as updates:
            self._optimizers.update(optimizer, used, updates)
        if self.ends_steps or has_post_step_hooks(optimizer):
            self.end_step()  # the code that follows, and hooks, may read parameters

    @property
    def loss_scale(self) -> float:
        """The factor of the next :meth:`scale_loss`; 1 without a scaler."""
        return self._scale.next

    @property
    def skipped_steps(self) -> int:
        """The number of steps that were skipped; a run that resumes goes on counting."""
        return self.outcomes.skipped

    def last_step(self, optimizer: Optimizer) -> StepOutcome | None:
        """The outcome of the last step of ``optimizer``; ``None`` before the first one since it was attached."""
        return self.outcomes.last(optimizer)

    # -------------------------------------------------------------------------------------------------- consistency

    @timed(Phase.GATHER)
    def settle(self) -> None:
        """Finish updates and gathers, take over edits by user code: shards and parameters agree then. Collective."""
        self.end_step()
        self.await_updates()

    @timed(Phase.GATHER)
    def end_step(self, reads: bool = True) -> None:
        """Gather what is stale, which no reader may do: after a step, before code that may read parameters. Collective.

        For what is updated where it is read, the reader waits (see :mod:`lightning_zero.sharding.pending`).

        Args:
            reads: whether there is such code. Otherwise, where work may overlap, units gather what they read (see
                :mod:`lightning_zero.sharding.refresh`). The same on all ranks.
        """
        self._map.absorb_edits()
        deferred = not reads and self.placement.executor.overlaps
        (self._map.refresher.defer if deferred else self._map.refresher.gather)()

    def await_updates(self, defaults: Collection[torch.dtype] = ()) -> None:
        """Wait for all updates that go on, or for those that differ between default dtypes. No communication."""
        for bucket in self._optimizers.differing(defaults) if defaults else self.buckets:
            bucket.await_update()

    def sync_buffers(self) -> None:
        """Give every rank rank 0's buffers (statistics of BatchNorm, ...), unless their shapes differ. Collective."""
        self._buffer_watch.share_all()

    def gathered(
        self, parameters: Iterable[Parameter], writeback: bool = False, full_precision: bool = False
    ) -> contextlib.AbstractContextManager[None]:
        """Hold ``parameters`` unsharded inside the context, on all ranks. Collective, on entry and on exit.

        In-place changes that torch's version counter sees are taken over on exit; each rank must make the same.

        Args:
            parameters: some of the module's.
            writeback: take over all values on exit, rank 0's on all ranks, also those written through ``.data``.
            full_precision: show the masters, in their dtype; what is taken over then is not rounded either. At stage 3
                tensors that share memory with the parameters stay valid after the context.
        """
        self.in_backward.check()
        return self._map.gathered(parameters, writeback, full_precision, self._root.hold_saved)

    def make_shadow(self, store: TensorStore | None = None) -> Shadow:
        """Second values of all weights and buffers, which begin as copies of them. The same call on all ranks.

        Args:
            store: where they rest; ``None``: where optimizer state does.
        """
        shadow = Shadow(self._map, next(self._shadow_numbers), store)
        self.shadows[shadow.number] = shadow
        return shadow

    def release(self) -> None:
        """Undo everything: ordinary parameters at full precision, no hooks, optimizers of their own. Collective."""
        self.in_backward.give_up()
        self.outcomes.forget()
        self._clipping.forget()
        self._optimizers.detach()
        for module in self.module.modules():
            detach_module(module)
        self._gradient_hooks.remove()
        for hooks in (*self._refresh_hooks, *self._unshard_hooks):
            hooks.remove()
        for shadow in self.shadows.values():
            shadow.release()
        self._map.release()
        self.released = True
        ENGINES.discard(self)

    @property
    def buckets(self) -> list[Bucket]:
        """All buckets in forward order; none after :meth:`release`."""
        return self._map.buckets

    def gradients_of(self, bucket: Bucket) -> BucketGradients:
        """The gradients of one of the buckets."""
        return self._map.gradients_of(bucket)

    def bucket_of(self, parameter: Tensor) -> Bucket | None:
        """The bucket that holds ``parameter``, or ``None``."""
        return self._map.holder(parameter)

    def holds(self, parameters: Iterable[Parameter]) -> bool:
        """Tell whether all ``parameters`` are the module's."""
        return all(self._map.holder(p) is not None for p in parameters)

    def holds_whole(self, parameters: Iterable[Parameter]) -> bool:
        """Tell whether each of the module's ``parameters`` lies whole on one rank of the shard group."""
        return all(self._map[p].layout.keeps_whole for p in parameters)


ENGINES: Registry[Engine] = Registry()
