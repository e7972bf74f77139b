"""The value of ``parameter.grad`` that user code sees for parameters that the engine holds.

    when                                      stages 0, 1                    stages 2, 3
    in hooks that autograd calls              the local gradient of one micro-batch
    after a micro-batch before the last one   this rank's sum                the averaged sum, where it was measured
    after the last one, until it is cleared   the averaged gradient

After the flush of the last micro-batch, all ranks know which parameters were used on any of them. Therefore either all
ranks or none see ``None``, and reading ``grad`` is not collective.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_zero.advice import Case, advice
from lightning_zero.sharding.averaged_gradient import (
    AveragedGradient,
    Place,
    finish_norm,
    norm_part,
    reduce_parts,
)
from lightning_zero.sharding.bucket_map import BucketMap
from lightning_zero.sharding.gradients import BucketGradients, Held
from lightning_zero.sharding.held import local_grad, set_local_grad
from lightning_zero.sharding.layout import Segment
from lightning_zero.sharding.reducer import Reducer
from lightning_zero.torch_private import inside_backward
from lightning_zero.update.clipping import GradientClipping


class VisibleGradients:
    """Computes ``parameter.grad``, and takes over assignments to it; see the module's docstring.

    Args:
        bucket_map: holds the module's parameters and gradients.
        reducer: tells whether gradients are being reduced.
        clipping: tells which parameters have gradients, and which factors must still be applied to them.
        clear: clears the gradients of parameters.
    """

    def __init__(
        self,
        bucket_map: BucketMap,
        reducer: Reducer[BucketGradients],
        clipping: GradientClipping,
        clear: Callable[[Iterable[Parameter]], None],
    ) -> None:
        self._map = bucket_map
        self._reducer = reducer
        self._clipping = clipping
        self._clear = clear
        self._norms: dict[float, dict[int, float]] = {}  # by order, then by id of the parameter
        self._norms_version = 0  # version of the gradients for which these norms were measured

    # --------------------------------------------------------------------------------------------------------- read

    def read_grad(self, parameter: Parameter) -> Tensor | None:
        """See :class:`~lightning_zero.sharding.held.GradientSource`."""
        local = local_grad(parameter)
        if inside_backward():
            return local
        bucket = self._map[parameter]
        gradients = self._map.gradients_of(bucket)
        alone = bucket.placement.mesh.world.size == 1 and self._clipping.scale == 1.0
        if not bucket.optimized:
            if local is not None and not alone:
                remedy = "Freeze it by requires_grad_(False)" if parameter.requires_grad else "Set it to None"
                raise RuntimeError(
                    f"the gradient of {self._name(parameter)!r} is not averaged over the ranks: no optimizer has the "
                    f"parameter. {remedy}, or ask for those of the optimizer's parameters only"
                )
            return local
        if self._reducer.in_backward:
            if (local is None and gradients.held in (Held.NONE, Held.UNSHARDED)) or (local is not None and alone):
                return local
            raise RuntimeError(
                f"the gradient of {self._name(parameter)!r} is not averaged yet: backward goes on, or was called on "
                f"the loss itself{advice(Case.NOT_FLUSHED, '; ')}"
            )
        if self._clipping.used is not None:
            return self._show(parameter) if id(parameter) in self._clipping.used else None
        if local is None:
            local = gradients.local_sum(bucket.index[id(parameter)])
        if local is None and gradients.held not in (Held.NONE, Held.UNSHARDED, Held.SUM):
            self._refuse_early(parameter)
        return local

    def _refuse_early(self, parameter: Parameter) -> None:
        raise RuntimeError(
            f"the gradient of {self._name(parameter)!r} is not complete: more micro-batches follow before the step. "
            "Read or change it after the last one, or read the sum so far by lightning_zero.full_grad(parameter), on "
            f"all ranks{advice(Case.NOT_LAST_MICRO_BATCH, '; ')}"
        )

    def _name(self, parameter: Parameter) -> str:
        bucket = self._map[parameter]
        return bucket.names[bucket.index[id(parameter)]]

    def _show(self, parameter: Parameter) -> AveragedGradient:
        """The averaged gradient; the same object at every call until the gradient is cleared."""
        if (shown := self._clipping.shown.get(id(parameter))) is None:
            place, segment = self._place(parameter)
            gradients = self._map.gradients_of(self._map[parameter])
            held = _SharedSlice(self, self._clipping, gradients, parameter, place.name, segment)
            shown = AveragedGradient(place, held)
            self._clipping.shown[id(parameter)] = shown
        return shown

    def _place(self, parameter: Parameter) -> tuple[Place, Segment | None]:
        bucket = self._map[parameter]
        index, placement = bucket.index[id(parameter)], bucket.placement
        segment = next((s for s in bucket.segments if s.param == index), None)
        start, numel = (0, 0) if segment is None else (segment.param_start, segment.numel)
        place = Place(
            name=bucket.names[index],
            format=bucket.formats[index],
            start=start,
            numel=numel,
            group=placement.mesh.shard,
            device=placement.device,
            slice_device=placement.optimizer_store.device,
            executor=weakref.ref(placement.executor),
        )
        return place, segment

    # ------------------------------------------------------------------------------------------------------- change

    def assign_grad(self, parameter: Parameter, value: Tensor | None) -> None:
        """See :class:`~lightning_zero.sharding.held.GradientSource`."""
        if inside_backward():
            set_local_grad(parameter, value)
        elif value is None:
            self._clear([parameter])
        elif isinstance(value, AveragedGradient):
            self._assign_slices(parameter, value)
        else:
            self._assign_full(parameter, value)

    def _assign_slices(self, parameter: Parameter, value: AveragedGradient) -> None:
        measured = self._map[parameter].optimized and self._clipping.used is not None
        shown = self._show(parameter) if measured else None
        if shown is None or shown.place != value.place:
            raise RuntimeError(
                f"{self._name(parameter)}.grad = {value!r}: each rank holds a slice of that gradient, and this "
                "parameter is divided into other slices, or its own gradient is not averaged yet. Assign a full "
                "tensor, the same on all ranks, such as lightning_zero.full_grad(parameter)"
            )
        if value.held is not shown.held:  # they are equal for `parameter.grad *= 2`, which has changed it in place
            self._take_over(parameter, value)

    def _assign_full(self, parameter: Parameter, value: Tensor) -> None:
        if value.shape != parameter.shape:
            raise RuntimeError(
                f"{self._name(parameter)}.grad = a tensor of shape {tuple(value.shape)}; expected that of the "
                f"parameter, {tuple(parameter.shape)}"
            )
        bucket = self._map[parameter]
        gradients, index = self._map.gradients_of(bucket), bucket.index[id(parameter)]
        if not bucket.optimized or self._reducer.in_backward:
            self._assign_local(parameter, value)
        elif self._clipping.used is not None:
            self._take_over(parameter, value)
        elif (local := gradients.local_sum(index)) is not None:
            local.copy_(bucket.placement.on_device(value.to(local.dtype), self._name(parameter)))
        elif gradients.held in (Held.NONE, Held.UNSHARDED, Held.SUM):
            self._assign_local(parameter, value)
        else:
            self._refuse_early(parameter)

    def _take_over(self, parameter: Parameter, value: Tensor) -> None:
        """Make ``value`` the averaged gradient of ``parameter``."""
        with torch.no_grad():
            self._show(parameter).copy_(value)
        self._clipping.note_change(used=parameter)

    def _assign_local(self, parameter: Parameter, value: Tensor) -> None:
        """Make ``value`` the local gradient, which will be reduced, and then unscaled. It must have the loss scale."""
        if local_grad(parameter) is None and self._clipping.scale != 1.0:  # there is no scaled gradient to make it from
            raise RuntimeError(
                f"{self._name(parameter)}.grad = a tensor, before its gradient is averaged: gradients have the loss "
                f"scale {self._clipping.scale:g} until then. Assign it after the last backward of the step"
                f"{advice(Case.NOT_FLUSHED, '; ')}. Without any backward, train in a precision that has no loss scale"
            )
        value = value.to(parameter.dtype)
        set_local_grad(parameter, self._map[parameter].placement.on_device(value, self._name(parameter)))

    # -------------------------------------------------------------------------------------------------------- norms

    def norm(self, parameter: Parameter, order: float) -> float:
        """The norm of the averaged gradient of ``parameter``. Collective, unless the norms of this order are known."""
        if self._norms_version != self._clipping.version:
            self._norms, self._norms_version = {}, self._clipping.version
        if order not in self._norms:
            self._norms[order] = self._measure(order)
        return self._norms[order][id(parameter)] * abs(self._clipping.factor_of(parameter) if order else 1.0)

    def _measure(self, order: float) -> dict[int, float]:
        """The norms of all gradients as they are held, with the loss scale, by id of the parameter. Collective."""
        buckets = [bucket for bucket in self._map.buckets if bucket.optimized]
        totals: dict[int, float] = {}
        parts: list[Tensor] = []
        for bucket in buckets:
            none = torch.empty(0, dtype=torch.float32, device=bucket.placement.optimizer_store.device)
            sharded, segments = self._map.gradients_of(bucket).sharded, {s.param: s for s in bucket.segments}
            for index, parameter in enumerate(bucket.parameters):
                totals[id(parameter)] = 0.0
                segment = None if sharded.empty else segments.get(index)
                held = none if segment is None else sharded.read(segment.start, segment.stop)
                parts.append(norm_part(held, order))
        place, _ = self._place(buckets[0].parameters[0])
        for key, total in zip(totals, reduce_parts(parts, order, place), strict=True):
            totals[key] = finish_norm(order, total)
        return totals

    def check(self, parameter: Parameter, held: _SharedSlice) -> None:
        """Check that ``held`` is still the gradient of ``parameter``.

        Raises:
            RuntimeError: the gradient was cleared, or another backward has added to it.
        """
        shown = self._clipping.shown.get(id(parameter))
        if shown is None or shown.held is not held:
            raise RuntimeError(
                f"the gradient of {held.name!r} that was read before is no longer there: it was cleared, or another "
                "backward has run. Read parameter.grad again; to keep one, clone it or take "
                "lightning_zero.full_grad(parameter)"
            )


class _SharedSlice:
    """This rank's elements of a parameter's gradient in the sharded gradient. Updates use the values written here.

    The sharded gradient has the loss scale, and clipping may still have to be applied to it. User code sees the
    elements unscaled and clipped.
    """

    def __init__(
        self,
        owner: VisibleGradients,
        clipping: GradientClipping,
        gradients: BucketGradients,
        parameter: Parameter,
        name: str,
        segment: Segment | None,
    ) -> None:
        self.name = name
        self._owner = owner
        self._clipping = clipping
        self._gradients, self._index = gradients, gradients.bucket.index[id(parameter)]
        self._sharded = gradients.sharded
        self._parameter = parameter
        self._start, self._stop = (0, 0) if segment is None else (segment.start, segment.stop)

    @property
    def dtype(self) -> torch.dtype:
        return self._sharded.shown_dtype

    def read(self) -> Tensor:
        """See :class:`~lightning_zero.sharding.averaged_gradient.Slice`."""
        self._owner.check(self._parameter, self)
        values, factor = self._sharded.read(self._start, self._stop), self._clipping.factor_of(self._parameter)
        values = values.to(self.dtype)
        return values if factor == 1.0 else values * factor

    def change(self, function: Callable[[Tensor], object]) -> None:
        """See :class:`~lightning_zero.sharding.averaged_gradient.Slice`."""
        self._owner.check(self._parameter, self)
        self._clipping.fold_clipping(self._parameter)
        self._sharded.raise_precision()
        values, scale = self._sharded.read(self._start, self._stop), self._clipping.scale
        if scale != 1.0:
            values.div_(scale)
        try:
            function(values)
        finally:
            if scale != 1.0:
                values.mul_(scale)
            self._sharded.keep(self._start, values)
        self._gradients.mark_assigned(self._index)
        self._clipping.note_change()

    def norm(self, order: float) -> float:
        """See :class:`~lightning_zero.sharding.averaged_gradient.Slice`."""
        self._owner.check(self._parameter, self)
        return self._owner.norm(self._parameter, order)
