"""Updates in backward: the update of a bucket begins as soon as its gradient of the last micro-batch is reduced.

The results have the bits of the ordinary step, because nothing decides about such a step as a whole: it has no clipping
and no loss scaler, and it is never skipped. Three things are left to the end of the step. The norm is noted there.
Buckets with a parameter that has no gradient on this rank are updated there, because another rank may have one. And
parameters are marked as stale there, because other ranks have updated their shards. Each rank decides alone which of
its buckets begin early: no collective depends on it.

The update of a bucket begins in backward when

- all of its parameters require a gradient: a frozen one may be computed with again later in this backward, where a
  checkpointed function is recomputed,
- all gradients that this backward brings to the bucket have arrived: no operator is left that computes one of them,
- every parameter of which this rank owns a segment has a gradient,
- the parameters are freed, where the stage shards them, and
- no ``gathered_parameters`` context holds them.

From then until the end of the step nobody may read the parameters of the bucket: they have the values of the next step,
and what is left of backward belongs to this one. A read raises an error; Python code meets it by the class of the
parameter, autograd by the version of the tensor. Another gradient of these parameters is an error, too. Only a backward
inside backward can bring one.

Updates in host memory run beside the training, in one lane, in the order in which they are submitted. Backward submits
them last unit first. If it submitted all of them, the next forward would wait for the whole lane at its first unit, and
no update would be left to run beside the rest of it. So a quarter of the elements waits for the end of the step. The
buckets that wait are spread evenly over the model and are submitted in forward order. A quarter is the share of forward
in a step that computes activations again; without recomputation it is a third.

A step that fails between its first update and its last leaves the weights *torn*: some parameters are updated and
others are not. From then on they are neither computed with nor saved, until all of them are loaded. Ranks can differ in
this: one may have begun updates where another has not. They compare notes at the start of a run and before a save.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch.optim import Optimizer

from lightning_zero.advice import Case, advice
from lightning_zero.sharding.bucket import Bucket, absorb_edits
from lightning_zero.sharding.bucket_map import BucketMap
from lightning_zero.sharding.forms import BucketForm
from lightning_zero.sharding.freed import without_freed_checks
from lightning_zero.sharding.gradients import BucketGradients
from lightning_zero.sharding.layout import Segment
from lightning_zero.storage import Lane
from lightning_zero.torch_private import has_pre_step_hooks
from lightning_zero.update.attached import AttachedOptimizers, parameters_of, state_was_edited
from lightning_zero.update.clipping import GradientClipping
from lightning_zero.update.cpu import CPUOptimizer
from lightning_zero.update.rules import ELEMENT_WISE
from lightning_zero.update.shell import StepCall
from lightning_zero.update.step_updates import StepUpdates

_LATE = 0.25  # the part of the elements updated beside the training that waits for the end of the step


class TornStepError(RuntimeError):
    """A step has updated some parameters and has not ended, so that the weights belong to two steps."""


def why_not_in_backward(optimizers: Sequence[Optimizer]) -> str | None:
    """The reason why updates by these optimizers cannot begin in backward; ``None`` if they can."""
    if len(optimizers) != 1:
        return (
            f"there are {len(optimizers)} optimizers; expected one. With several, the gradients of a backward may "
            "belong to an optimizer that steps later, or not at all"
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
    """Begins the updates of a step in its last backward; see the module's docstring.

    Args:
        bucket_map: holds the parameters.
        optimizers: the attached ones; there may be only one.
        clipping: counts the changes of gradients.
        enabled: ``False`` leaves all updates to the step; nothing is torn then.
    """

    def __init__(
        self, bucket_map: BucketMap, optimizers: AttachedOptimizers, clipping: GradientClipping, enabled: bool
    ) -> None:
        self._map = bucket_map
        self._optimizers = optimizers
        self._clipping = clipping
        self._enabled = enabled
        self._expected: Optimizer | None = None  # the optimizer whose `step` runs the closure
        self._updates: StepUpdates | None = None  # of the step that has begun and not ended
        self._early: set[int] = set()  # ids of the buckets that may begin in this backward; the same on all ranks
        self._waiting: dict[int, list[Segment]] = {}  # this rank's segments of those that have not begun, by the id
        self._gradients_version = 0  # the version of the gradients when this backward began
        self._torn_on: list[int] = []  # ranks that have said that their weights are torn

    def check_optimizers(self) -> None:
        """Refuse newly attached optimizers whose updates cannot begin in backward.

        Raises:
            ValueError: it says why.
        """
        if not self._begun:  # a step of the optimizers before them will not end any more
            self._updates = None
        optimizers = [*self._optimizers]
        if self._enabled and optimizers and (reason := why_not_in_backward(optimizers)) is not None:
            raise ValueError(f"updates cannot begin in backward: {reason}{advice(Case.NOT_IN_BACKWARD, '. ')}")

    def refuse_clipping(self) -> None:
        """Refuse to clip gradients: some parameters may be updated before all gradients are known.

        Raises:
            TornStepError: some are updated already.
            ValueError: none is updated yet.
        """
        if self._enabled:
            message = (
                "gradients cannot be clipped, because updates begin in backward, before all gradients are known"
                f"{advice(Case.NOT_IN_BACKWARD, '. ')}"
            )
            raise TornStepError(f"{message}. {self._torn()}") if self._begun else ValueError(message)

    @contextlib.contextmanager
    def expecting(self, optimizer: Optimizer) -> Iterator[None]:
        """Surrounds the closure of the optimizer's ``step``, which runs the backward of the last micro-batch.

        Raises:
            TornStepError: an earlier step has left the weights torn.
            ValueError: user code runs before the optimizer's steps.
        """
        self.check()
        if self._enabled and has_pre_step_hooks(optimizer):
            raise ValueError(
                f"updates cannot begin in backward: {type(optimizer).__name__} has a hook of register_step_pre_hook, "
                f"which would run after some of the updates{advice(Case.NOT_IN_BACKWARD, '. ')}"
            )
        self._expected = optimizer if self._enabled else None
        try:
            yield
        finally:
            self._expected = None

    def begin(self, last: bool) -> None:
        """Decide whether updates may begin in the backward that follows.

        Args:
            last: whether it is the last backward before a step. Updates begin in such a one only, and only inside the
                closure of that step.

        Raises:
            TornStepError: an earlier backward has begun updates, and its step has not ended.
        """
        if self._begun and self._expected is not None:
            raise TornStepError(
                "another backward begins in the closure of a step after the one that has begun updates. Add the losses "
                f"and call backward once{advice(Case.NOT_IN_BACKWARD, '; ')}. {self._torn()}"
            )
        self.check()
        self._updates, self._waiting = None, {}
        optimizer = self._expected
        if not last or optimizer is None or not self._optimizers.is_prepared(optimizer):
            return
        self._updates = self._optimizers.begin_step(optimizer, self._clipping.factor(optimizer), StepCall(optimizer))
        late = left_to_forward(self._map.buckets)
        self._early = {
            id(bucket)
            for bucket, waits in zip(self._map.buckets, late, strict=True)
            if not waits and all(parameter.requires_grad for parameter in bucket.parameters)
        }
        found = self._map.segments_of(parameters_of(optimizer))
        self._waiting = {id(bucket): segments for bucket, segments in found if id(bucket) in self._early}
        self._gradients_version = self._clipping.version

    @property
    def may_be_torn(self) -> bool:
        """Whether weights are torn, or may become so: a step has not ended in which some rank may have begun updates.

        Also an ordinary step, which fails between two of its updates. It is the same on all ranks that ask at the same
        place of a step.
        """
        return self._updates is not None or bool(self._torn_on)

    def offer(self, completed: Sequence[BucketGradients]) -> None:
        """Begin the updates of buckets whose gradients are complete and reduced.

        A bucket waits for the step where a parameter has no gradient on this rank.
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
            absorb_edits([bucket])
            try:
                self._updates.begin([(bucket, segments)])
            finally:  # also where it fails: it may have written some of the values
                updated = [p for p, received in zip(bucket.parameters, gradients.received, strict=True) if received]
                torch.autograd.graph.increment_version(updated)  # autograd refuses operators that have saved one
                bucket.defer(self._refuse_read, self._refuse_read)

    def check_arrival(self, gradients: BucketGradients, index: int) -> None:
        """Refuse the gradient of a parameter that is updated already.

        Args:
            gradients: of the parameter's bucket.
            index: of the parameter in it.

        Raises:
            TornStepError: the update has begun without this gradient.
        """
        if self._has_begun(gradients.bucket):
            raise self._late_gradient(repr(gradients.bucket.names[index]))

    def check_left_over(self, left_over: Sequence[BucketGradients]) -> None:
        """Refuse gradients that some rank has not reduced with the others of their bucket.

        Args:
            left_over: the same on all ranks.

        Raises:
            TornStepError: an update has begun without them, on this rank or perhaps on another one; on all ranks.
        """
        several = self.may_be_torn and self._map.placement.mesh.world.size > 1
        for gradients in left_over:
            if self._has_begun(gradients.bucket) or (several and id(gradients.bucket) in self._early):
                raise self._late_gradient(f"a parameter of {gradients.bucket.name}, on this rank or another one,")

    def _late_gradient(self, whose: str) -> TornStepError:
        return TornStepError(
            f"another gradient of {whose} has arrived after the update of that parameter had begun in the same "
            "backward. A backward inside backward brings such gradients, as checkpointing with use_reentrant=True does "
            f"for a weight that several segments share. Use use_reentrant=False{advice(Case.NOT_IN_BACKWARD, '; ')}. "
            f"{self._torn()}"
        )

    def _refuse_read(self) -> None:
        raise TornStepError(
            "a parameter is read in a backward after its update has begun there. A hook may have read it, a function "
            "of checkpointing that is computed again and uses it without a gradient, or a backward inside backward, as "
            "of checkpointing with use_reentrant=True. Read it before backward, or use use_reentrant=False"
            f"{advice(Case.NOT_IN_BACKWARD, '; ')}. {self._torn()}"
        )

    def _has_begun(self, bucket: Bucket) -> bool:
        return self._enabled and self._updates is not None and id(bucket) in self._updates.begun

    @property
    def _begun(self) -> list[Bucket]:
        return [bucket for bucket in self._map.buckets if self._has_begun(bucket)]

    @contextlib.contextmanager
    def completing(self, optimizer: Optimizer, call: StepCall) -> Iterator[StepUpdates]:
        """Surrounds the rest of a step; afterwards the parameters may be read.

        Args:
            optimizer: whose step it is.
            call: of its ``step``.

        Yields:
            The updates of the step, of which some may have begun.

        Raises:
            TornStepError: updates have begun with other gradients, hyperparameters or state than the step finds.
        """
        if self._begun:
            self._check_unchanged(optimizer)
            self._let_read()
        else:
            self._updates = self._optimizers.begin_step(optimizer, self._clipping.factor(optimizer), call)
        assert self._updates is not None
        yield self._updates
        self._updates, self._torn_on = None, []

    def _check_unchanged(self, optimizer: Optimizer) -> None:
        assert self._updates is not None
        changed = ""
        if self._clipping.version != self._gradients_version:
            changed = "gradients were changed"
        elif not self._updates.as_now() or state_was_edited(optimizer):
            changed = f"hyperparameters or state of {type(optimizer).__name__} were changed"
        if changed:
            raise TornStepError(
                f"{changed} after backward had begun updates with what was there before. Change them before backward "
                f"or after the step{advice(Case.NOT_IN_BACKWARD, ', or: ')}. {self._torn()}"
            )

    def check(self) -> None:
        """Raise where the weights are known to be torn. No communication.

        Raises:
            TornStepError: they are, on this rank, or on one that has said so.
        """
        if self._begun or self._torn_on:
            raise TornStepError(self._torn())

    def share(self) -> None:
        """Let every rank know on which ranks the weights are torn. Collective, unless no updates begin in backward."""
        if self._enabled:
            answers = self._map.placement.mesh.world.all_gather_object(bool(self._begun), "ask for torn weights")
            self._torn_on = [rank for rank, torn in enumerate(answers) if torn]

    def check_together(self) -> None:
        """Raise on all ranks where the weights of one are torn. Collective, unless no updates begin in backward.

        Raises:
            TornStepError: they are.
        """
        try:
            self.share()
        finally:  # a rank whose weights are torn says so, also where it cannot ask the others any more
            self.check()

    @contextlib.contextmanager
    def overwriting(self, everything: bool) -> Iterator[None]:
        """Surrounds code that overwrites parameters. Collective.

        Args:
            everything: whether it overwrites all of them; torn weights are whole again then, unless it fails.

        Raises:
            TornStepError: the weights are torn, and some of them would stay.
        """
        if not everything:
            self.check_together()
        self._let_read()
        torn, self._updates, self._torn_on = (self._updates, self._torn_on), None, []
        try:
            yield
        except BaseException:
            self._updates, self._torn_on = torn
            raise

    def give_up(self) -> None:
        """Give torn weights to whoever takes over the parameters, with a warning."""
        if self._begun or self._torn_on:
            warnings.warn(f"the module gets torn weights back. {self._torn()}", stacklevel=3)
            self._let_read()
            self._updates, self._torn_on = None, []

    def _let_read(self) -> None:
        for bucket in self._begun:
            bucket.end_deferred(gather=False)

    def _torn(self) -> str:
        """The end of messages: what is the matter with the weights, and what to do."""
        mesh = self._map.placement.mesh
        on = f" on {mesh.board.describe(self._torn_on)}" if self._torn_on and mesh.world.size > 1 else ""
        return (
            f"The step is torn{on}: it has updated some parameters and has not ended, so that the others have the "
            "values of the step before. These weights are neither saved nor computed with"
            f"{advice(Case.TORN, '. ')}"
        )


def left_to_forward(buckets: Iterable[Bucket | BucketForm]) -> list[bool]:
    """Tell which buckets wait for the end of the step, so that the next forward has updates to run beside it.

    They hold a quarter of the elements that are updated beside the training, and are spread evenly over these.

    Args:
        buckets: in forward order. The first one that is updated beside the training waits.
    """
    found, owed = list[bool](), 0.0  # elements that should wait and do not so far
    for bucket in buckets:
        placement = bucket.placement
        beside = bucket.optimized and placement.executor.overlaps and placement.update_lane is Lane.HOST
        owed += _LATE * bucket.layout.shard_numel * beside
        found.append(beside and owed > 0)
        owed -= bucket.layout.shard_numel * found[-1]
    return found
