"""Updates under backward: each bucket's begins as soon as its gradient of the last micro-batch is reduced.

That is exact where nothing decides about a step as a whole: no clipping, no loss scaler, no skipped steps. What a step
still knows at its end only, it does there: the norm, which is noted; the update of what had no gradient on this rank,
since others may have had one; what other ranks' updates made stale. Which buckets begin early is a rank's own affair:
no collective depends on it.

A bucket may begin when all gradients that a backward brings it have arrived, so that no operator is left that computes
one, each of this rank's segments among them, and stage 3 has freed its parameters. From then on until the end of the
step they have values of two steps, as the parameters of one module: reading one is an error, here and, by the versions
of tensors, in autograd. So is another gradient of it, which only a backward inside backward can bring.

Of updates on host memory, which go on beside the training, every fourth waits for the step. A lane does them in the
order of submission, those of backward in its order: the next forward, which goes the other way, would need the last of
them first, and later find nothing to run beside. So a quarter is left that comes in forward order, spread over all of
it: as large a part as forward is of a step, where activations are computed again (elsewhere it is a third).

A step that ends between its first update and its last has torn the weights: some are of this step, some of the one
before. Nothing is computed with them or saved from then on, until all of them are loaded.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch.optim import Optimizer

from lightning_zero.advice import Case, advice
from lightning_zero.sharding.bucket import Bucket
from lightning_zero.sharding.bucket_map import BucketMap
from lightning_zero.sharding.freed import without_freed_checks
from lightning_zero.sharding.gradients import BucketGradients
from lightning_zero.sharding.layout import FlatLayout, Segment
from lightning_zero.sharding.placement import BucketPlacement
from lightning_zero.storage import Lane
from lightning_zero.torch_private import has_pre_step_hooks
from lightning_zero.update.attached import AttachedOptimizers, parameters_of, state_was_edited
from lightning_zero.update.clipping import GradientClipping
from lightning_zero.update.cpu import CPUOptimizer
from lightning_zero.update.rules import ELEMENT_WISE
from lightning_zero.update.shell import StepCall
from lightning_zero.update.step_updates import StepUpdates

_LATE = 0.25  # of the elements that are updated beside the training


class TornStepError(RuntimeError):
    """A part of the parameters was updated by a step that has not ended."""


def why_not_in_backward(optimizers: Sequence[Optimizer]) -> str | None:
    """The reason for which updates by these optimizers cannot begin in backward; ``None``: they can."""
    if len(optimizers) != 1:
        return (
            f"there are {len(optimizers)} optimizers, and it takes one: with several a backward may bring gradients "
            "of which some step later, or not at all"
        )
    kind = type(optimizers[0])
    if kind not in ELEMENT_WISE and not issubclass(kind, CPUOptimizer):
        known = ", ".join(sorted(known.__name__ for known in ELEMENT_WISE))
        return (
            f"the optimizer is {kind.__module__}.{kind.__qualname__}, whose step may read the loss, or update one "
            f"parameter by another; expected one of torch's {known}, or a CPU optimizer such as CPUAdamW"
        )
    return None


class UpdatesInBackward:
    """Begins a step's updates in its last backward; see the module's docstring.

    Args:
        bucket_map: of the module.
        optimizers: those attached; of one alone a step is expected.
        clipping: knows of changes of gradients.
        enabled: whether updates begin in backward; otherwise nothing ever does.
    """

    def __init__(
        self, bucket_map: BucketMap, optimizers: AttachedOptimizers, clipping: GradientClipping, enabled: bool
    ) -> None:
        self._map = bucket_map
        self._optimizers = optimizers
        self._clipping = clipping
        self._enabled = enabled
        self._expected: Optimizer | None = None  # whose step calls the backward that comes
        self._updates: StepUpdates | None = None  # of the step whose last backward has begun
        self._waiting: dict[int, list[Segment]] = {}  # by id of the bucket: what has not begun and may
        self._gradients_version = 0  # of the gradients, when that backward began

    def check_optimizers(self) -> None:
        """Refuse optimizers whose updates cannot begin in backward.

        Raises:
            ValueError: it says why.
        """
        optimizers = [*self._optimizers]
        if self._enabled and optimizers and (reason := why_not_in_backward(optimizers)) is not None:
            raise ValueError(f"updates cannot begin in backward: {reason}{advice(Case.NOT_IN_BACKWARD, '. ')}")

    @contextlib.contextmanager
    def expecting(self, optimizer: Optimizer) -> Iterator[None]:
        """Around the closure of the optimizer's ``step``, which runs the backward of the last micro-batch.

        Raises:
            ValueError: user code runs before the optimizer's steps.
        """
        if self._enabled and has_pre_step_hooks(optimizer):
            raise ValueError(
                f"updates cannot begin in backward: {type(optimizer).__name__} has a hook of register_step_pre_hook, "
                f"which would come after some of them{advice(Case.NOT_IN_BACKWARD, '. ')}"
            )
        self._expected = optimizer if self._enabled else None
        try:
            yield
        finally:
            self._expected = None

    def begin(self, last: bool) -> None:
        """Before a backward; updates begin in the ``last`` one of a step alone, of which the optimizer is expected.

        Raises:
            TornStepError: the step before has not ended.
        """
        self.check()
        self._updates, self._waiting = None, {}
        optimizer = self._expected
        if not last or optimizer is None or not self._optimizers.is_prepared(optimizer):
            return
        self._updates = self._optimizers.begin_step(optimizer, self._clipping.factor(optimizer), StepCall(optimizer))
        waits = {id(b): left for b, left in zip(self._map.buckets, left_to_forward(self._map.buckets), strict=True)}
        found = self._map.segments_of(parameters_of(optimizer))
        self._waiting = {id(bucket): segments for bucket, segments in found if not waits[id(bucket)]}
        self._gradients_version = self._clipping.version

    def offer(self, completed: Sequence[BucketGradients]) -> None:
        """Begin to update buckets whose gradients are complete, and reduced; at stage 3 they are freed.

        Those wait for the step that have a parameter without a gradient on this rank.
        """
        if completed and self._waiting:
            self._begin(completed)

    @torch.no_grad()
    @without_freed_checks
    def _begin(self, completed: Sequence[BucketGradients]) -> None:
        for gradients in completed:
            bucket, segments = gradients.bucket, self._waiting.get(id(gradients.bucket), [])
            if not segments or bucket.pins or not all(gradients.received[s.param] for s in segments):
                continue
            assert self._updates is not None
            del self._waiting[id(bucket)]
            edit = bucket.hidden_edit()
            bucket.absorb_edits(everything=edit is not None and bool(edit))
            self._updates.begin([(bucket, segments)])
            # Autograd refuses operators that have saved one of them.
            updated = [p for p, received in zip(bucket.parameters, gradients.received, strict=True) if received]
            torch.autograd.graph.increment_version(updated)
            bucket.defer(self._refuse_read, self._refuse_read)

    def check_arrival(self, gradients: BucketGradients, index: int) -> None:
        """For a gradient that has arrived.

        Raises:
            TornStepError: its parameter was updated without it.
        """
        if self._has_begun(gradients.bucket):
            raise TornStepError(
                f"another gradient of {gradients.bucket.names[index]!r} has arrived in the backward in which it was "
                f"updated, by a backward inside it{advice(Case.NOT_IN_BACKWARD, '. ')}. {_torn()}"
            )

    def _refuse_read(self) -> None:
        raise TornStepError(
            "a parameter is read in the step that updates it, after its gradient was complete: by a hook, a function "
            "that is computed again and used it without a gradient, or by a backward inside backward, as of "
            f"checkpointing with use_reentrant=True. Use use_reentrant=False{advice(Case.NOT_IN_BACKWARD, '; ')}. "
            f"{_torn()}"
        )

    def _has_begun(self, bucket: Bucket) -> bool:
        return self._updates is not None and id(bucket) in self._updates.begun

    @property
    def _begun(self) -> list[Bucket]:
        return [bucket for bucket in self._map.buckets if self._has_begun(bucket)]

    @contextlib.contextmanager
    def completing(self, optimizer: Optimizer) -> Iterator[StepUpdates | None]:
        """Around the rest of a step: gives what has begun, if anything has; afterwards its parameters may be read.

        Raises:
            TornStepError: the step is not the one that backward has begun.
        """
        if not self._begun:
            yield None
            return
        updates = self._updates
        assert updates is not None
        if self._clipping.version != self._gradients_version:
            raise TornStepError(f"gradients were changed after updates by them had begun in backward. {_torn()}")
        if not updates.as_now() or state_was_edited(optimizer):
            raise TornStepError(
                f"hyperparameters or state of {type(optimizer).__name__} were changed after updates by them had begun "
                f"in backward. {_torn()}"
            )
        self._let_read()
        yield updates
        self._updates = None

    def check(self) -> None:
        """Raise where parameters are torn.

        Raises:
            TornStepError: they are.
        """
        if self._begun:
            raise TornStepError(_torn())

    @contextlib.contextmanager
    def overwriting(self, everything: bool) -> Iterator[None]:
        """Around what overwrites parameters; those that were torn are so no longer, if it is ``everything``.

        Raises:
            TornStepError: they are, and some will stay.
        """
        if not everything:
            self.check()
        self._let_read()
        yield
        self._updates = None

    def give_up(self) -> None:
        """The parameters become somebody else's, with a warning where they are torn."""
        if self._begun:
            warnings.warn(f"parameters are given out that are torn. {_torn()}", stacklevel=3)
            self._let_read()
            self._updates = None

    def _let_read(self) -> None:
        for bucket in self._begun:
            bucket.end_deferred(gather=False)


class Updated(Protocol):
    """A bucket that is updated, or one of a plan."""

    @property
    def optimized(self) -> bool: ...
    @property
    def placement(self) -> BucketPlacement: ...
    @property
    def layout(self) -> FlatLayout: ...


def left_to_forward(buckets: Iterable[Updated]) -> list[bool]:
    """Whether each bucket's update beside the training waits for the step; those that do are spread over all of it.

    Args:
        buckets: in forward order; the first that is updated there is among them.
    """
    found, owed = list[bool](), 0.0  # elements
    for bucket in buckets:
        placement = bucket.placement
        beside = bucket.optimized and placement.executor.overlaps and placement.update_lane is Lane.HOST
        owed += _LATE * bucket.layout.shard_numel * beside
        found.append(beside and owed > 0)
        owed -= bucket.layout.shard_numel * found[-1]
    return found


def _torn() -> str:
    return (
        "The step is torn: it has updated some parameters, and has not ended, so that the others are those of the step "
        f"before. Nothing is saved of them{advice(Case.TORN, '. ')}"
    )
