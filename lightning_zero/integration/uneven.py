"""Runs in which ranks have different numbers of batches, though all of them compute together.

In an evaluation they may, although at stage 3 every forward gathers on all ranks. Lightning distributes the samples of
``predict`` without repeating any, so that some ranks have a batch less than others. A rank that runs out of batches
gathers and frees its units in the order of its last pass, without computing, once for each batch that the longest
loader has more. In training a rank that runs out of batches notes where, for the error of ranks that wait for it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_zero.engine import Engine
from lightning_zero.integration import private
from lightning_zero.integration.patches import Undo
from lightning_zero.sharding import Board, Mesh, Subject


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


class _NoBatch(Callback):
    """Notes that an epoch of training has no batch on this rank.

    Args:
        board: on which it is noted.
    """

    def __init__(self, board: Board) -> None:
        self._board = board

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.fit_loop.epoch_loop.batch_progress.current.ready == 0:
            self._note(trainer)

    def leave(self, trainer: pl.Trainer) -> None:
        """Note that a fit, which ends here, has not even begun an epoch."""
        if 0 in (trainer.num_training_batches, trainer.limit_train_batches):
            self._note(trainer)

    def _note(self, trainer: pl.Trainer) -> None:
        self._board.put(Subject.LOADER, f"before the first batch of epoch {trainer.current_epoch}")


def note_missing_batches(trainer: pl.Trainer, board: Board) -> list[Undo]:
    """Have a fit note on the board where this rank has no batch at all, for the error of ranks that wait for it.

    Returns:
        What undoes it at the end of the fit.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    callbacks.insert(0, no_batch := _NoBatch(board))  # the hooks of others may wait for ranks that are elsewhere
    return [lambda: callbacks.remove(no_batch), lambda: no_batch.leave(trainer)]
