"""Evaluations in which ranks have different numbers of batches, though at stage 3 every forward gathers on all ranks.

Lightning distributes the samples of ``predict`` without repeating any, so that some ranks have a batch less than
others. A rank that runs out of batches gathers and frees its units in the order of its last pass, without computing,
once for each batch that the longest loader has more.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn

from lightning_zero.engine import Engine
from lightning_zero.integration import private
from lightning_zero.sharding import Mesh, Subject


class EvenPasses:
    """Makes the passes of one evaluation that this rank lacks. Collective.

    Args:
        trainer: that evaluates; its loop has set up its loaders.
        engine: that shards the module.
        mesh: its groups, and the board on which a rank notes where its loaders ended.
    """

    def __init__(self, trainer: pl.Trainer, engine: Engine, mesh: Mesh) -> None:
        self._loop = private.evaluation_of(trainer)
        self._engine, self._board, self._done = engine, mesh.board, 0
        assert trainer.state.stage
        self._name = f"the {trainer.state.stage.value} loader"
        if trainer.state.fn != TrainerFn.FITTING:
            self._board.put(Subject.LOADER, "")  # clears the note of an earlier run
        own = private.batches_of(self._loop)
        self._missing = _missing(own, mesh.world.all_gather_object(own, "tell how many batches there are"))
        self._make_up()

    def end_batch(self) -> None:
        """Make the passes that are missing after this batch, and note where the last loader ended."""
        self._done += 1
        self._make_up()
        if self._loop.batch_progress.is_last_batch:  # type: ignore[attr-defined]  # both kinds of loops set it
            # Only ranks whose loaders have no length can end at different numbers.
            number = self._done + sum(self._missing.values())
            self._board.put(Subject.LOADER, f"after batch {number} of {self._name}")

    def _make_up(self) -> None:
        for _ in range(self._missing[self._done]):
            with self._engine.forward_context():
                self._engine.prefetcher.repeat()


def _missing(own: Sequence[float], everyone: Sequence[Sequence[float]]) -> Counter[int]:
    """Counts the passes to make before the next batch, by the number of batches that this rank has run.

    Args:
        own: the numbers of batches of this rank's loaders, which are used one after the other.
        everyone: those of all ranks.
    """
    if len({len(numbers) for numbers in everyone}) > 1 or any(math.inf in numbers for numbers in everyone):
        return Counter()  # nobody knows; the error of the rank that waits in vain will say where loaders ended
    missing = Counter[int]()
    for end, number, numbers in zip(accumulate(own), own, zip(*everyone, strict=True), strict=True):
        missing[int(end)] += int(max(numbers) - number)
    return missing
