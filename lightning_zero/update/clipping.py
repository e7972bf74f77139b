"""Norm, overflow and clipping of the sharded gradients, between backward and step.

All values that no rank knows alone are exchanged in one small all-reduce. It is done once after a backward, as soon as
the norm, a clipping or a step is asked for. It also tells which gradients are left over, that is, not reduced yet. If
there are any, its other results are dropped, these gradients are reduced, and it is repeated. And it tells whether a
rank has changed buffers; if so, all ranks get the buffers of rank 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_zero import ops
from lightning_zero.ops import formulas
from lightning_zero.sharding.averaged_gradient import AveragedGradient
from lightning_zero.sharding.bucket_map import BucketMap
from lightning_zero.sharding.buffers import BufferWatch
from lightning_zero.sharding.gradients import BucketGradients
from lightning_zero.sharding.held import set_local_grad
from lightning_zero.sharding.layout import Segment, runs
from lightning_zero.sharding.placement import BucketPlacement
from lightning_zero.storage import TensorStore, device_type
from lightning_zero.storage.timers import Phase, timed
from lightning_zero.update.attached import AttachedOptimizers, parameters_of
from lightning_zero.update.gradient_scale import GradientScale

_NORM_TILE = 1 << 20  # elements converted to float64 at a time


class GradientStats(NamedTuple):
    """Measures of one optimizer's gradients. All ranks know them after the small all-reduce."""

    norm: float  # global L2 norm of the unscaled gradients; inf or nan if an element of them is
    found_inf: bool  # whether there is a non-finite value on any rank
    used: frozenset[int]  # ids of the parameters that received a gradient on any rank


class GradientClipping:
    """Measures and clips the sharded gradients of optimizers, after a backward has been flushed.

    Call :meth:`measure` before anything that needs the norm, overflow or used parameters.

    Attributes:
        used: ids of the parameters that have a gradient on any rank; ``None`` if they are not known yet after the last
            backward.
        shown: by id of the parameter, the gradient that user code has been given, as long as it is the parameter's.
        version: a number that grows with every change of gradients.

    Args:
        bucket_map: holds the module's parameters and gradients.
        optimizers: the optimizers whose gradients are measured and clipped.
        scale: keeps the factor by which the gradients are scaled.
        placement: groups, device and stores.
        buffers: watches the module's buffers.
    """

    def __init__(
        self,
        bucket_map: BucketMap,
        optimizers: AttachedOptimizers,
        scale: GradientScale,
        placement: BucketPlacement,
        buffers: BufferWatch,
    ) -> None:
        self._map = bucket_map
        self._optimizers = optimizers
        self._scale = scale
        self._placement = placement
        self._buffer_watch = buffers
        self.timers = placement.mesh.timers
        self.version = 0
        self._overflowed: set[int] = set()  # ids of optimizers with gradients that overflowed before user code saw them
        self.forget()

    def forget(self) -> None:
        """Forget measures and requests for clipping, because other gradients will follow."""
        self.version += 1
        self.used: set[int] | None = None
        self.shown: dict[int, AveragedGradient] = {}
        self._stats: dict[int, GradientStats] | None = None
        self._norms: dict[int, float] = {}  # by id of the optimizer: the norm before anything was clipped
        self._clip: dict[int, float] = {}  # by id of the optimizer: the factor that clipping by norm asked for
        self._clamped = False  # whether gradients were changed after the norm in `_stats` was measured

    def begin_backward(self) -> None:
        """Prepare for a backward, which adds to the gradients that were not cleared."""
        for optimizer in self._optimizers:
            self._fold_clipping(optimizer)  # gradients that are not cleared stay clipped, as in torch
        self.forget()

    def clear(self, parameters: Iterable[Parameter], set_to_none: bool) -> None:
        """Clear gradients of ``parameters``, unsharded and sharded; see :meth:`Engine.zero_grad`."""
        self.note_change()
        by_bucket: dict[int, list[int]] = {}
        cleared = set()
        for parameter in parameters:
            cleared.add(id(parameter))
            self.shown.pop(id(parameter), None)
            if (bucket := self._map.holder(parameter)) is not None:
                set_local_grad(parameter, None)
                by_bucket.setdefault(id(bucket), []).append(bucket.index[id(parameter)])
            elif set_to_none or parameter.grad is None:
                parameter.grad = None
            else:  # as torch does
                parameter.grad = torch.zeros_like(parameter.grad)
        emptied = False
        if set_to_none and self.used is not None:
            self.used -= cleared
            emptied = not self.used  # true also where code clears one by one the parameters that have a gradient
        for gradients in self._map.gradients:
            bucket = gradients.bucket
            indices = range(len(bucket.parameters)) if emptied else by_bucket.get(id(bucket))
            if indices:
                gradients.clear(indices, keep_used=not set_to_none)
        for optimizer in self._optimizers:
            held = parameters_of(optimizer)
            unused = self.used is not None and self.used.isdisjoint(map(id, held))  # cleared one by one, perhaps
            # If only some of an optimizer's gradients were cleared, the others stay clipped.
            if unused or cleared.issuperset(map(id, held)):
                self._clip.pop(id(optimizer), None)
                self._norms.pop(id(optimizer), None)
                self._overflowed.discard(id(optimizer))

    # ---------------------------------------------------------------------------------------------------- measures

    def measure(self, clamped: bool = False) -> list[BucketGradients]:
        """Make norm, overflow and used parameters known on all ranks. Collective, unless they are known already.

        Args:
            clamped: measure again if gradients were clamped since the last time.

        Returns:
            Gradients that some rank has not reduced; the same list on all ranks. If there are any, nothing has been
            measured: reduce them, and call this again.
        """
        if clamped and self._clamped:
            self._stats = None
            self._clamped = False
        if self._stats is not None:
            return []
        self._optimizers.admit()
        self._stats, left_over = self._all_reduce()
        if self._stats is not None:
            self._norms = {key: stats.norm for key, stats in self._stats.items()} | self._norms
            self.used = set().union(*(stats.used for stats in self._stats.values()))
            if self._scale.adapts:
                self._overflowed |= {key for key, stats in self._stats.items() if stats.found_inf}
        return left_over

    def stats(self, optimizer: Optimizer) -> GradientStats:
        """Norm, overflow and used parameters of the gradients of ``optimizer``.

        With a loss scaler, an overflow stays one even if user code then makes the gradients finite: it shows that the
        scale was too large.
        """
        stats = self._known[id(optimizer)]
        return stats._replace(found_inf=True) if id(optimizer) in self._overflowed else stats

    @property
    def _known(self) -> dict[int, GradientStats]:
        assert self._stats is not None, "measure() comes first"
        return self._stats

    @timed(Phase.OPTIMIZER)
    def _all_reduce(self) -> tuple[dict[int, GradientStats] | None, list[BucketGradients]]:
        """Do the one small all-reduce of a step: norm² per optimizer, used parameters, left-over gradients.

        It also tells whether some rank has changed buffers; if so, the buffers are shared at the end.

        Gradients are left over if they arrived after their bucket was reduced (a parameter's hook fires several times
        under reentrant checkpointing), or if user code assigned them. Any rank may have some, so all must reduce them.
        """
        everything, mesh, device = self._map.gradients, self._placement.mesh, self._placement.device
        received = [float(received) for gradients in everything for received in gradients.received]
        left = [float(gradients.left_over) for gradients in everything]
        flags = torch.tensor([*received, *left, self._buffer_watch.has_changed()], dtype=torch.float64, device="cpu")
        squares, digests = self._squares(), mesh.digests()
        parts = [device_type(device).send(part, device) for part in (digests, squares, flags)]
        own = torch.cat(parts)
        with mesh.world.explaining(what := "sum up norms and flags"):
            # This is the only place in a step at which the host waits for the device.
            sums = mesh.world.all_reduce_(own, what).cpu()
        self._placement.executor.release()
        sizes = [len(digests), len(squares), len(received), len(left), 1]
        all_digests, totals, users, leavers, (changes,) = (part.tolist() for part in sums.split(sizes))
        mesh.check_digests(all_digests)
        if left_over := [gradients for gradients, count in zip(everything, leavers, strict=True) if count]:
            return None, left_over
        if changes:
            self._buffer_watch.share()
        parameters = [p for bucket in self._map.buckets for p in bucket.parameters]
        used = frozenset(id(p) for p, count in zip(parameters, users, strict=True) if count)
        stats = {
            id(optimizer): GradientStats(math.sqrt(square) / self._scale.value, not math.isfinite(square), used)
            for optimizer, square in zip(self._optimizers, totals, strict=True)
        }
        return stats, []

    def _squares(self) -> Tensor:
        """This rank's part of the squared gradient norm of each optimizer; ``[optimizers]`` float64.

        The squares are added in forward order, so that the result has the same bits in whichever memory gradients rest.
        """
        owners: dict[int, tuple[int, ...]] = {}
        optimizers = 0
        for number, optimizer in enumerate(self._optimizers):
            optimizers += 1
            for parameter in parameters_of(optimizer):
                owners[id(parameter)] = (*owners.get(id(parameter), ()), number)
        found: list[tuple[int, Tensor | float]] = []
        with self.timers.phase(Phase.WAIT):
            for gradients in self._map.gradients:  # also what is not read: then the device needs no more memory for it
                gradients.sharded.await_reduction()
        # Replicas hold the same slices, so only one of them contributes.
        if self._placement.mesh.replica.rank == 0:
            for gradients in self._map.gradients:
                if gradients.sharded.squares is not None:
                    found += _known_squares(gradients, gradients.sharded.squares, owners, optimizers)
                elif not gradients.sharded.empty:
                    found += _squares_of(gradients, owners)
        return _add_up(found, optimizers, self._placement.device)

    def norm(self, optimizer: Optimizer) -> float:
        """The global L2 norm of the gradients of ``optimizer`` that was measured, times the factor of clipping."""
        return self.stats(optimizer).norm * self._clip.get(id(optimizer), 1.0)

    def unclipped_norm(self, optimizer: Optimizer) -> float:
        """The global L2 norm before the first clipping."""
        return self._norms[id(optimizer)]

    def nonfinite_names(self, optimizer: Optimizer, limit: int = 3) -> str:
        """Names of the first parameters, in forward order, with a gradient that is not finite on any rank. Collective.

        It costs an all-reduce of one number per parameter. It is called only to make a message.
        """
        device, flags = self._placement.device, dict[torch.device, Tensor]()  # by where gradients rest
        numbers = {id(p): n for n, p in enumerate(p for bucket in self._map.buckets for p in bucket.parameters)}
        for bucket, segments in self._map.segments_of(parameters_of(optimizer)):
            sharded = self._map.gradients_of(bucket).sharded
            if not sharded.empty:
                for s in segments:  # without waiting for the result of one segment before the next is submitted
                    pieces = sharded.read_pieces(s.start, s.stop, _NORM_TILE)
                    finite = torch.stack([piece.isfinite().all() for piece in pieces]).all()
                    if finite.device not in flags:
                        flags[finite.device] = torch.zeros(len(numbers), dtype=torch.float64, device=finite.device)
                    flags[finite.device][numbers[id(bucket.parameters[s.param])]] += finite.logical_not()
        vector = torch.zeros(len(numbers), dtype=torch.float64, device=device)
        for of_place in flags.values():
            vector += device_type(device).send(of_place, device)
        world = self._placement.mesh.world
        with world.explaining(what := "name what is not finite"):
            counts = world.all_reduce_(vector, what).tolist()
        names = [name for bucket in self._map.buckets for name in bucket.names]
        found = [name for name, count in zip(names, counts, strict=True) if count]
        return ", ".join(found[:limit]) + (f" and {len(found) - limit} more" if len(found) > limit else "")

    # ----------------------------------------------------------------------------------------------------- clipping

    def clip_norm_(self, optimizer: Optimizer, max_norm: float) -> float:
        """Scale the gradients of ``optimizer`` to a global norm of at most ``max_norm``.

        The factor is applied inside the update. Gradients whose norm is not finite stay as they are.

        Returns:
            The global L2 norm before.
        """
        norm = self.norm(optimizer)
        # `skip_nonfinite` deals with a norm that is not finite.
        factor = min(1.0, max_norm / (norm + 1e-6)) if math.isfinite(norm) else 1.0
        self._clip[id(optimizer)] = factor * self._clip.get(id(optimizer), 1.0)
        if self._optimizers.shares_parameters(optimizer):
            self._fold_clipping(optimizer)  # the other optimizers must find the shared gradients clipped
            self._clamped = True
        self.version += 1
        return norm

    @timed(Phase.OPTIMIZER)
    def clip_value_(self, optimizer: Optimizer, clip_value: float) -> None:
        """Clamp every gradient of ``optimizer`` to ``[-clip_value, clip_value]`` in place."""
        self._fold_clipping(optimizer)

        def clamp(gradients: Tensor) -> None:
            bound = min(clip_value * self._scale.value, torch.finfo(gradients.dtype).max)
            gradients.clamp_(-bound, bound)

        self._change(optimizer, clamp)
        self._clamped = True
        self.version += 1

    def _fold_clipping(self, optimizer: Optimizer) -> None:
        """Apply the factor of :meth:`clip_norm_` to the gradients, before anything but a step is done with them."""
        scale = self._clip.pop(id(optimizer), 1.0)
        if scale != 1.0:
            self._change(optimizer, lambda gradients: gradients.mul_(scale))

    def _change(self, optimizer: Optimizer, function: Callable[[Tensor], object]) -> None:
        """Call ``function``, which changes gradients in place, with each part of the gradients of ``optimizer``.

        16-bit gradients become fp32 before: 16 bits would round the change, which an update with a factor does not.
        """
        for bucket, segments in self._map.segments_of(parameters_of(optimizer)):
            sharded = self._map.gradients_of(bucket).sharded
            if not sharded.empty:
                sharded.raise_precision()
                for run in runs(segments, lambda _: True):
                    sharded.change(run.start, run.stop, function)

    # ----------------------------------------------------------------------------------------- changes by user code

    def note_change(self, used: Parameter | None = None) -> None:
        """Note that gradients were changed, so that measures are out of date. All ranks must make the same call.

        Args:
            used: a parameter that has a gradient now and had none before.
        """
        self._stats = None
        self.version += 1
        if used is not None and self.used is not None:
            self.used |= {id(used)}

    def fold_clipping(self, parameter: Parameter) -> None:
        """Apply the factor of :meth:`clip_norm_` to the gradients of each optimizer that has ``parameter``."""
        for optimizer in self._optimizers.with_parameter(parameter) if self._clip else []:
            self._fold_clipping(optimizer)

    @property
    def scale(self) -> float:
        """The factor by which all gradients are scaled."""
        return self._scale.value

    # ------------------------------------------------------------------------------------------------------- values

    def factor_of(self, parameter: Parameter) -> float:
        """The factor that clips and unscales the gradient of ``parameter``."""
        clip = 1.0
        if self._clip:
            clip = math.prod(self._clip.get(id(o), 1.0) for o in self._optimizers.with_parameter(parameter))
        return clip / self._scale.value

    def factor(self, optimizer: Optimizer) -> float:
        """The factor by which an update multiplies the gradients of ``optimizer``: clips and unscales them."""
        # This is the scale of the gradients; the scaler's may have changed since.
        return self._clip.get(id(optimizer), 1.0) / self._scale.value

    def full(self, parameter: Parameter) -> Tensor | None:
        """The full gradient of one of the module's parameters, unscaled and clipped; see :func:`full_grad`.

        Returns:
            A tensor with the shape of the parameter, at least fp32; None if the parameter has no gradient on any rank.
        """
        bucket = self._map[parameter]
        if not any(id(parameter) in stats.used for stats in self._known.values()):
            return None
        sharded, placement = self._map.gradients_of(bucket).sharded, bucket.placement
        # Clipping may have raised the precision of the slices on some ranks only.
        dtype = placement.sum_dtype(sharded.dtype)
        full = bucket.gather_read(
            lambda start, stop: sharded.read(start, stop).to(dtype), dtype, placement.optimizer_store.memory
        )
        gradient = bucket.view(full, bucket.index[id(parameter)])
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
        return wide.mul_(self.factor_of(parameter))


def _add_up(found: list[tuple[int, Tensor | float]], optimizers: int, device: torch.device) -> Tensor:
    """The sum of the numbers of each optimizer, in their order; on ``device`` if some of the numbers are there."""
    here = torch.tensor([part for _, part in found if not isinstance(part, Tensor)], dtype=torch.float64, device="cpu")
    on_host = len(here) == len(found)
    totals = torch.zeros(optimizers, dtype=torch.float64, device="cpu" if on_host else device)
    arrived = iter(here if on_host or not len(here) else device_type(device).send(here, device))
    for number, part in found:
        totals[number] += part if isinstance(part, Tensor) else next(arrived)
    return totals


def _squares_of(gradients: BucketGradients, owners: dict[int, tuple[int, ...]]) -> Iterator[tuple[int, Tensor | float]]:
    """Sums of squares of a bucket's sharded gradient, each with the number of an optimizer that has these gradients.

    A non-finite element makes its sum non-finite. The squares of finite fp32 elements cannot overflow float64.
    """
    bucket, sharded = gradients.bucket, gradients.sharded
    as_on_host = bucket.placement.optimizer_store.as_on_host

    def owners_of(segment: Segment) -> tuple[int, ...] | None:
        return owners.get(id(bucket.parameters[segment.param]))

    for run in runs(bucket.segments, owners_of, gap=bucket.layout.align - 1):
        total: Tensor | float
        if (noted := sharded.squares_of(run.start, run.stop)) is not None:
            total = noted
        elif sharded.in_tiles and sharded.dtype != torch.float64:
            parts = sharded.read_pieces(run.start, run.stop, ops.SQUARES_PIECE)
            total = ops.sum_of_squares_in_pieces(parts)
        else:
            total = _sum_of_squares(sharded.read(run.start, run.stop), as_on_host)
        for number in owners_of(run.segments[0]) or ():
            yield number, total


def squares_scratch(numel: int, store: TensorStore) -> int:
    """Bytes of temporary memory that the sum of the squares of ``numel`` gradients in a store needs, for a plan."""
    if ops.runs_on(store.device):
        return 0
    return formulas.squares_scratch(numel) if store.as_on_host else min(numel, _NORM_TILE) * torch.float64.itemsize


def _known_squares(
    gradients: BucketGradients, squares: Tensor, owners: dict[int, tuple[int, ...]], optimizers: int
) -> Iterator[tuple[int, Tensor]]:
    """The sum of ``squares`` over the segments of a bucket that an optimizer has, with the optimizer's number."""
    bucket = gradients.bucket
    owned = [owners.get(id(bucket.parameters[segment.param]), ()) for segment in bucket.segments]
    for number in range(optimizers):
        chosen = [number in numbers for numbers in owned]
        if all(chosen):
            yield number, squares.sum()
        elif any(chosen):
            mask = device_type(squares.device).send(
                torch.tensor(chosen, dtype=torch.bool, device="cpu"), squares.device
            )
            yield number, squares.where(mask, 0.0).sum()  # not a product: 0 times inf is nan


def _sum_of_squares(values: Tensor, as_on_host: bool) -> Tensor | float:
    """The sum of squares as a number, or as a 0-dim float64 tensor on the device of the values."""
    if values.dtype != torch.float64 and ops.runs_on(values.device):
        return ops.sum_of_squares(values)
    if values.dtype != torch.float64 and as_on_host:
        return formulas.sum_of_squares(values)
    total = torch.zeros((), dtype=torch.float64, device=values.device)
    for tile in values.split(_NORM_TILE):
        wide = tile.double()
        total += torch.dot(wide, wide)
    return total.item() if ops.runs_on(values.device) else total
