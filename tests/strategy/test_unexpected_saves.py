"""Saves that come unexpectedly, of a fit that fails or gets a signal: by all ranks at one place, or by none."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from engine import driver
from helpers.ranks import RankPool, ranks
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException
from strategy.fits import Lit, Recipe, make_trainer, state_of
from torch import Tensor

from lightning_zero import CollectiveError, ZeroStrategy
from lightning_zero.integration import private, signals
from lightning_zero.integration.launchers import GatheringLauncher
from lightning_zero.sharding import Subject
from lightning_zero.sharding.bucket import Bucket
from lightning_zero.storage import Ticket


class Failing(Lit):
    """Fails in the second step: on all ranks, on rank 1 alone, or on rank 0 a collective later than on rank 1.

    Or on all ranks between the updates of two buckets.
    """

    where: str

    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        if index == 1 and self.where != "step":
            self._fail()
        return super().training_step(batch, index)

    def begin_update(self, bucket: Bucket, update: Any) -> Ticket:
        self.notes.append(bucket)
        if self.trainer.global_step == 1 and self.notes.count(self.notes[0]) == 2 and bucket is not self.notes[0]:
            self._fail()
        return BEGIN_UPDATE(bucket, update)

    def _fail(self) -> None:
        strategy = self.trainer.strategy
        assert isinstance(strategy, ZeroStrategy)
        assert strategy._mesh is not None
        driver.limit_waits(strategy._mesh, 1.0)
        if self.where == "apart":
            strategy._mesh.world.digest += dist.get_rank()  # as after another collective
        if self.where == "alone" and dist.get_rank() == 0:
            while not strategy._mesh.board.read(Subject.FAILURE):  # then it begins to wait for the other
                time.sleep(0.01)
            return
        raise LookupError("no such token")


class Full(OnExceptionCheckpoint):
    """Finds no space on its disk."""

    def on_exception(self, *_: Any) -> None:
        raise OSError("no space left")


BEGIN_UPDATE = Bucket.begin_update


def fail(where: str, strategy: dict[str, Any], folder: str) -> tuple[str, list[str], list[str]]:
    """The error of a fit, its notes, and the checkpoints that callbacks have saved then."""
    callbacks = [OnExceptionCheckpoint(folder), ModelCheckpoint(folder, filename="other", save_on_exception=True)]
    callbacks[:0] = [Full(folder)] * (where == "everywhere")
    trainer, lit = make_trainer(strategy, callbacks=callbacks, enable_checkpointing=True), Failing(Recipe())
    lit.where = where
    with (
        mock.patch.object(Bucket, "begin_update", autospec=True, side_effect=lit.begin_update),
        mock.patch("lightning_zero.sharding.board._SECONDS_TO_AGREE", 0.2 if where == "alone" else 5.0),
        pytest.raises((LookupError, CollectiveError)) as caught,
    ):
        trainer.fit(lit)
    notes = getattr(caught.value, "__notes__", [])
    return str(caught.value), notes, sorted(path.name for path in Path(folder).glob("*.ckpt"))


@ranks(2)
@pytest.mark.parametrize("where", ["alone", "apart"])
def test_a_failing_rank_saves_nothing_that_others_do_not_save(pool: RankPool, where: str, tmp_path: Path) -> None:
    """Its error reaches the others first, and nobody waits until the timeout for a save that not all have begun."""
    errors, notes, saved = zip(*pool.run(fail, where, {"stage": 3}, str(tmp_path)), strict=True)
    assert errors[1] == "no such token"
    assert where == "apart" or errors[0].endswith("because rank 1 failed: LookupError: no such token")
    for of_rank in notes:
        starts = [note.partition(" has saved nothing: all ranks must save together")[0] for note in of_rank]
        assert starts == ["OnExceptionCheckpoint", "ModelCheckpoint"]
    assert saved == ([], [])


@ranks(2, slow=[4])
def test_what_fails_on_all_ranks_is_saved(pool: RankPool, tmp_path: Path) -> None:
    """Also where there are several shard groups, and where one of the saves fails: the first error is raised."""
    for error, notes, saved in pool.run(fail, "everywhere", {"stage": 3, "shard_size": 2}, str(tmp_path)):
        assert (error, notes) == ("no such token", ["Full could not save: OSError('no space left')"])
        assert saved == ["on_exception.ckpt", "other.ckpt"]


def test_a_step_that_fails_between_two_updates_is_not_saved(pool1: RankPool, tmp_path: Path) -> None:
    """Its parameters belong to two steps."""
    ((error, notes, saved),) = pool1.run(fail, "step", {"stage": 3}, str(tmp_path))
    assert (error, saved) == ("no such token", [])
    assert all("has saved nothing: the step that failed may have updated some" in note for note in notes)
    assert len(notes) == 2


class FailingAfterwards(Lit):
    """Fails when the strategy has been torn down: on all ranks or on rank 1 alone."""

    where: str

    def on_fit_end(self) -> None:
        if self.where == "everywhere" or dist.get_rank() == 1:
            raise LookupError("no such token")


def fail_afterwards(where: str, folder: str) -> tuple[list[str], list[str], bool]:
    """Notes of the error, if there is one, what was saved, and whether callbacks are as before."""
    callback = OnExceptionCheckpoint(folder)
    trainer = make_trainer({"stage": 3}, callbacks=[callback], enable_checkpointing=True)
    lit, notes = FailingAfterwards(Recipe(steps=1)), list[str]()
    lit.where = where
    with mock.patch("lightning_zero.sharding.board._SECONDS_TO_AGREE", 0.2 if where == "alone" else 5.0):
        try:
            trainer.fit(lit)
        except LookupError as error:
            notes += getattr(error, "__notes__", ["none"])
    return notes, sorted(path.name for path in Path(folder).glob("*.ckpt")), "on_exception" not in vars(callback)


@ranks(2)
def test_a_rank_that_fails_after_the_teardown_saves_nothing_alone(pool: RankPool, tmp_path: Path) -> None:
    """What fails there on all ranks is saved."""
    first, (notes, saved, as_before) = pool.run_within(20.0, fail_afterwards, "alone", str(tmp_path))
    assert first == ([], [], True)
    assert [note.partition(":")[0] for note in notes] == ["OnExceptionCheckpoint has saved nothing"]
    assert (saved, as_before) == ([], True)
    expected = (["none"], ["on_exception.ckpt"], True)
    assert pool.run(fail_afterwards, "everywhere", str(tmp_path)) == [expected, expected]


def fail_in_other_processes(folder: str, impatient: bool) -> tuple[list[str], list[Path], bool]:
    """Notes of an error of ranks that this process has started, what was saved, and whether callbacks are as before.

    Or of Ctrl-C while it waits for the end of the others.
    """
    callback = OnExceptionCheckpoint(folder)
    trainer = make_trainer("zero2", callbacks=[callback], enable_checkpointing=True)
    trainer.strategy._launcher = GatheringLauncher(trainer.strategy, "spawn")  # type: ignore[attr-defined,arg-type]
    with (
        mock.patch.object(private.MultiProcessingLauncher, "launch", side_effect=LookupError("rank 1 gave up")),
        mock.patch.object(signals.PassOn, "_end_ranks", side_effect=[KeyboardInterrupt] if impatient else [None]),
        pytest.raises((LookupError, SystemExit)) as caught,
    ):
        trainer.fit(Lit(Recipe()))
    error = caught.value.__context__ if impatient else caught.value
    return getattr(error, "__notes__", []), [*Path(folder).iterdir()], "on_exception" not in vars(callback)


@pytest.mark.parametrize("impatient", [False, True])
def test_the_process_that_starts_ranks_saves_no_weights_of_its_own(
    pool1: RankPool, impatient: bool, tmp_path: Path
) -> None:
    (((note,), saved, as_before),) = pool1.run(fail_in_other_processes, str(tmp_path), impatient)
    assert note.startswith("OnExceptionCheckpoint has saved nothing: this process has started the ranks")
    assert saved == []
    assert as_before


class Forked(Lit):
    """Ends in the second step, in ranks that a process has forked.

    All of them fail, rank 1 or all of them exit as if all was well, or that process or rank 1 alone gets a signal.
    """

    end: str

    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        if index == 1 and self.end == "error":
            raise LookupError("no such token")
        if index == 1 and (self.end == "exits" or (self.end == "exit" and dist.get_rank() == 1)):
            sys.exit(0)
        if index == 1 and self.end == "alone" and dist.get_rank() == 1:
            signal.raise_signal(signal.SIGTERM)
        if index == 1 and self.end.startswith("SIG"):
            self._end_starter()
        return super().training_step(batch, index)

    def _end_starter(self) -> None:
        if dist.get_rank() == 1:
            os.kill(os.getppid(), signal.Signals[self.end])
        callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        while not any(isinstance(each, signals._Terminate) and each._signalled for each in callbacks):
            time.sleep(0.01)


def end_forked(end: str, folder: str) -> tuple[str, str, list[str], list[str], bool]:
    """The error of a fit for which this process forks ranks, its text and notes, what was saved, and SIGTERM's mark.

    The process has forked others before, for a validation, if rank 1 alone gets a signal.
    """
    for name in ("LOCAL_RANK", "RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    flags = {"callbacks": [OnExceptionCheckpoint(folder)], "enable_checkpointing": True, "limit_val_batches": 1}
    trainer = make_trainer({"stage": 3, "start_method": "fork"}, devices=2, **flags)
    lit = Forked(Recipe(steps=6))
    lit.end = end
    if end == "alone":
        assert [*trainer.validate(lit, verbose=False)[0]] == ["val_loss"]
    with (
        mock.patch("lightning_zero.sharding.board._SECONDS_TO_AGREE", 0.2 if end == "exit" else 5.0),
        mock.patch("lightning_zero.integration.signals._SECONDS_TO_LOOK", 0.0),
        pytest.raises(BaseException) as caught,  # noqa: PT011  (the test looks which one)
    ):
        trainer.fit(lit)
    kind, notes = type(caught.value).__name__, getattr(caught.value, "__notes__", [])
    saved = sorted(path.name for path in Path(folder).glob("*.ckpt"))
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    return kind, str(caught.value), notes, saved, trainer.received_sigterm


def test_what_fails_on_all_forked_ranks_is_saved(new_ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    """By the ranks, whose error the process that has forked them raises; it saves nothing itself."""
    ((kind, text, (note,), saved, _),) = new_ranks(1).run(end_forked, "error", str(tmp_path))
    assert kind == "ProcessRaisedException"
    assert "LookupError: no such token" in text
    assert "saved nothing" not in text
    assert note.startswith("OnExceptionCheckpoint has saved nothing: this process has started the ranks")
    assert saved == ["on_exception.ckpt"]


@pytest.mark.parametrize(
    ("end", "error", "begins"),
    [
        ("SIGTERM", "SIGTERMException", "SIGTERM has ended the run: process "),
        ("alone", "SIGTERMException", "SIGTERM has ended the run: process "),
        ("SIGINT", "SystemExit", "1"),
    ],
)
def test_a_signal_to_the_process_that_has_forked_the_ranks_ends_them(
    new_ranks: Callable[[int], RankPool], end: str, error: str, begins: str, tmp_path: Path
) -> None:
    """After their step, where they save; so does SIGTERM to one of the ranks."""
    ((kind, text, _, saved, received),) = new_ranks(1).run_within(30.0, end_forked, end, str(tmp_path))
    assert kind == error
    assert text.startswith(begins)
    assert saved == ["on_exception.ckpt"]
    assert received == (end != "SIGINT")


@pytest.mark.parametrize(("end", "saves"), [("exit", []), ("exits", ["on_exception.ckpt"])])
def test_a_forked_rank_that_exits_is_an_error(
    new_ranks: Callable[[int], RankPool], end: str, saves: list[str], tmp_path: Path
) -> None:
    """The process that has forked it would wait for its results."""
    ((kind, text, _, saved, received),) = new_ranks(1).run_within(30.0, end_forked, end, str(tmp_path))
    assert kind == "ProcessRaisedException"
    assert "SystemExit(0) has ended this rank" in text or "rank 1 failed: SystemExit: 0" in text
    assert (saved, received) == (saves, False)


def terminate_at_once() -> int | None:
    """The exit status of a rank that gets SIGTERM when it was just forked, where the process's handler is still its."""
    with signals.PassOn():
        rank = multiprocessing.get_context("fork").Process(target=signal.raise_signal, args=(signal.SIGTERM,))
        rank.start()
        rank.join()
    return rank.exitcode


def test_sigterm_before_a_forked_rank_has_begun_is_no_success(new_ranks: Callable[[int], RankPool]) -> None:
    """Other ranks would wait for it."""
    assert new_ranks(1).run(terminate_at_once) == [1]


class Terminated(Lit):
    """SIGTERM comes to the last rank alone, or to all ranks in a validation, and more than once."""

    at: str

    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        self._signal("forward", index == self.trainer.accumulate_grad_batches)
        return super().training_step(batch, index)

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.notes.append((self.trainer.global_step, index))
        self._signal("validation", index == 1)
        self._signal("validations", index == 1)

    def _signal(self, at: str, now: bool) -> None:
        if at == self.at and now and (at == "validations" or dist.get_rank() == dist.get_world_size() - 1):
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)


def terminate(at: str, micro: int, folder: str) -> tuple[int, list[Any], bool, bool]:
    """The steps of a fit that SIGTERM ends, its batches of validation, and whether the last weights were saved."""
    trainer = make_trainer(
        {"stage": 3},
        callbacks=[OnExceptionCheckpoint(folder)],
        enable_checkpointing=True,
        accumulate_grad_batches=micro,
        limit_val_batches=3 if at.startswith("validation") else 0,
        val_check_interval=1,
    )
    lit = Terminated(Recipe(steps=6, micro=micro))
    lit.at = at
    seconds = 0.2 if at == "validation" else 5.0
    with (
        mock.patch("lightning_zero.sharding.board._SECONDS_TO_AGREE", seconds),
        mock.patch("lightning_zero.integration.signals._SECONDS_TO_LOOK", 0.0),
        pytest.raises(SIGTERMException),
    ):
        trainer.fit(lit)
    saved = torch.load(Path(folder, "on_exception.ckpt"), weights_only=True)
    after = state_of(trainer)
    same = all(torch.equal(saved["state_dict"][f"model.{name}"], value) for name, value in after.items())
    return trainer.global_step, lit.notes, same, trainer.received_sigterm


@ranks(2)
@pytest.mark.parametrize(("at", "micro", "validated"), [("forward", 2, 0), ("validation", 1, 3), ("validations", 1, 2)])
def test_sigterm_saves_and_ends_a_fit_on_all_ranks(
    pool: RankPool, at: str, micro: int, validated: int, tmp_path: Path
) -> None:
    """After a step, or in a validation where it has come to all."""
    first, second = pool.run_within(30.0, terminate, at, micro, str(tmp_path))
    steps, *_ = first
    assert steps in ((2, 3) if at == "forward" else (1,))  # rank 0 may look just before the last rank tells it
    assert first == second == (steps, [(1, index) for index in range(validated)], True, True)


class Signalled(Lit):
    """SLURM's signal comes to the last rank alone, in the second step, of which it may be the first micro-batch."""

    after: dict[str, Tensor]
    at: str

    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        if index == self.trainer.accumulate_grad_batches and self.at == "forward":
            self._signal()
        if index == 1 and self.at == "backward":
            next(self.model.parameters()).register_hook(lambda _: self._signal())  # type: ignore[arg-type,return-value]
        return super().training_step(batch, index)

    def validation_step(self, batch: Tensor, index: int) -> None:
        super().validation_step(batch, index)
        if self.at in ("validation", "terminated"):
            self._signal()
        if self.at == "terminated" and self.trainer.global_step == 1:
            signal.raise_signal(signal.SIGTERM)

    def _signal(self) -> None:
        if self.trainer.global_step == 1 and dist.get_rank() == dist.get_world_size() - 1:
            signal.raise_signal(signal.SIGUSR2)
            self.notes.append(sorted(path.name for path in Path(self.trainer.default_root_dir).glob("*.ckpt")))

    def on_train_batch_end(self, outputs: Any, batch: Tensor, index: int) -> None:
        validated = self.at in ("validation", "terminated")
        if index == (0 if validated else 2 * self.trainer.accumulate_grad_batches - 1):
            self.after = state_of(self.trainer)


def requeue(at: str, micro: int, options: dict[str, Any], folder: str) -> list[Any]:
    """Which files were there when the handler of the signal had returned, where it has run."""
    program, rank, size = Path(folder, "scontrol"), dist.get_rank(), dist.get_world_size()
    if rank == 0:
        program.write_text(f"#!/bin/sh\necho $@ >> {folder}/requeued")
        program.chmod(0o755)
    variables = {"PROCID": rank, "LOCALID": rank, "NODEID": 0, "NTASKS": size, "NTASKS_PER_NODE": size, "JOB_ID": 4711}
    slurm = {f"SLURM_{name}": str(value) for name, value in variables.items()}
    with mock.patch.dict(os.environ, {**slurm, "PATH": f"{folder}:{os.environ['PATH']}"}):
        trainer = make_trainer(
            ZeroStrategy(persistence_numel=0, **options),
            plugins=[SLURMEnvironment(requeue_signal=signal.SIGUSR2)],
            default_root_dir=folder,
            limit_val_batches=2 if at == "terminated" else 1,
            val_check_interval=1,
            accumulate_grad_batches=micro,
        )
        lit = Signalled(Recipe(micro=micro))
        lit.at = at
        with pytest.raises(SIGTERMException) if at == "terminated" else contextlib.nullcontext():
            trainer.fit(lit)
    if rank == 0:
        (saved,) = Path(folder).glob("hpc_ckpt_*.ckpt")
        weights = torch.load(saved, weights_only=True)["state_dict"]
        assert all(torch.equal(weights[f"model.{name}"], value) for name, value in lit.after.items())
        assert Path(folder, "requeued").read_text() == "requeue 4711\n"
    return lit.notes


@ranks(2)
@pytest.mark.parametrize(("at", "micro"), [("forward", 2), ("backward", 1), ("validation", 1), ("terminated", 1)])
def test_a_requeued_job_saves_at_the_end_of_the_step(pool: RankPool, at: str, micro: int, tmp_path: Path) -> None:
    """Of the step, or of the validation, in which one rank was signalled: all ranks save there, once.

    A checkpoint between two micro-batches would lack the gradient of the first.
    """
    options = {"stage": 3, "skip_nonfinite": False, "update_in_backward": at == "backward"}
    assert pool.run(requeue, at, micro, options, str(tmp_path)) == [[], [[]]]
