"""The order of reductions, which is the same on all ranks, whichever parameters each of them uses.

Stages 0 to 2 reduce buckets in reverse module order. A bucket is reduced as soon as it and all buckets before it have
all their gradients. Stage 3 cannot do so, because it also gathers in backward: a rank that uses all parameters of a
unit would reduce the unit before it gathers the next one, and a rank that does not would reduce it afterwards. There a
unit is reduced when all its backward has run; on every rank that happens between the same two gathers. The flush after
backward reduces the rest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from lightning_zero.advice import Case, advice
from lightning_zero.sharding.policies import ShardingPolicy
from lightning_zero.torch_private import inside_backward


class Reducible(Protocol):
    """The gradients of a bucket: a :class:`~lightning_zero.sharding.gradients.BucketGradients`, or those of a plan.

    Attributes:
        expected: the largest number of gradients that a backward brings; 0 where no optimizer uses them.
    """

    @property
    def expected(self) -> int: ...

    def accumulate(self) -> None:
        """Keep this micro-batch's gradients unsharded until the last one."""
        ...

    def reduce(self, last: bool) -> None:
        """Reduce the unsharded gradients. Collective.

        Args:
            last: whether the step follows.
        """
        ...


R = TypeVar("R", bound=Reducible)


class Reducer(Generic[R]):
    """Decides when gradients are reduced: during backward, or after it.

    Args:
        gradients: of the buckets, in forward order.
        sharding: says whether gradients are sharded after every micro-batch, and whether parameters are sharded.
    """

    def __init__(self, gradients: Sequence[R], sharding: ShardingPolicy) -> None:
        self._all = tuple(gradients)
        self._sharding = sharding
        self.in_backward = False
        self.last_micro_batch = True  # whether a step follows the backward that runs, or that has run last
        self._eager = False  # whether gradients are reduced during this backward, and not only by its flush
        self._pending: list[R] = []  # not yet reduced in this backward, in the order of reductions
        self._expected: dict[int, int] = {}  # by id of the gradients: the number that this backward brings at most
        self._ready: dict[int, set[int]] = {}  # by id: indices of the parameters whose gradient has arrived
        self._open: set[int] = set()  # ids of those that took part in an earlier micro-batch of this step

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Surrounds the backward of every micro-batch but the last of a step."""
        previous, self.last_micro_batch = self.last_micro_batch, False
        try:
            yield
        finally:
            self.last_micro_batch = previous

    def begin(self, eager: bool) -> None:
        """Prepare for a backward, which follows; see :meth:`Engine.begin_backward`."""
        self.in_backward = True
        self._eager = eager and self._reduces_now
        self._ready = {id(gradients): set() for gradients in self._all}
        # `toggle_optimizer` and user code that freezes parts turn `requires_grad` off, on all ranks alike. A bucket
        # without gradients in the last micro-batch may still hold those of earlier ones.
        self._expected = {id(gradients): gradients.expected for gradients in self._all}
        self._pending = [g for g in reversed(self._all) if self._expected[id(g)] or id(g) in self._open]

    @property
    def _reduces_now(self) -> bool:
        return self._sharding.shard_grads or self.last_micro_batch

    def mark_ready(self, gradients: R, index: int) -> list[R]:
        """Note that the gradient of a bucket's parameter ``index`` has been accumulated.

        Returns:
            What was reduced because of it.
        """
        self._ready[id(gradients)].add(index)
        reduced = []
        if self._eager and not self._sharding.shard_params:
            while self._pending and self._complete(self._pending[0]):
                reduced.append(self._pending[0])
                self._reduce(self._pending[0])
        return reduced

    def _complete(self, gradients: R) -> bool:
        return len(self._ready[id(gradients)]) >= self._expected[id(gradients)]

    def end_unit(self, unit: Iterable[R]) -> list[R]:
        """Stage 3: reduce the gradients of a unit, all of whose backward has run.

        Returns:
            Those that have all the gradients that this backward brings. A unit that is called twice has not, after the
            backward of one call.
        """
        complete = []
        for gradients in unit:
            if self._eager and self._expected[id(gradients)]:
                self._reduce(gradients)
                complete += [gradients] * self._complete(gradients)
        return complete

    def _reduce(self, gradients: R) -> None:
        gradients.reduce(self.last_micro_batch)
        if gradients in self._pending:  # it is not where a unit is called twice, and so reduced twice
            self._pending.remove(gradients)
        self._open.add(id(gradients))

    def check_ended(self) -> None:
        """Check that a flush now frees no parameters that the rest of a backward reads.

        Raises:
            RuntimeError: it would: a hook of autograd runs.
        """
        if self._sharding.shard_params and inside_backward():
            raise RuntimeError(
                "a step, a gradient norm or full_grad was called inside a backward, by a hook of a parameter or a "
                "tensor: at stage 3 the parameters that the rest of the backward reads would be freed. Call it after "
                f"the backward{advice(Case.STEP_IN_BACKWARD, '; ')}"
            )

    def flush(self) -> None:
        """Reduce the gradients that are left after the outermost backward, or keep them for the last micro-batch."""
        self.in_backward = self._eager = False
        for gradients in list(self._pending):
            if self._reduces_now:
                self._reduce(gradients)
            else:
                gradients.accumulate()
                self._open.add(id(gradients))
        self._pending = []
        if self.last_micro_batch:
            self._open = set()

    @staticmethod
    def reduce_left_over(left_over: Iterable[R]) -> None:
        """Reduce gradients that have arrived after their bucket was reduced, before a step. The same call on all ranks.

        Checkpointing with ``use_reentrant=True`` may bring a parameter several gradients one after another, and user
        code may assign gradients.
        """
        for gradients in left_over:
            gradients.reduce(last=True)
