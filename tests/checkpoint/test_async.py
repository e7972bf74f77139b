"""Saves in the background: what they hold, when errors appear, and what is removed meanwhile."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint.remote import RefusedError
from checkpoint.resuming import Resumable, SaveAfter, run
from checkpoint.test_contents import resident
from checkpoint.test_full import ALONE, Derived, files_in
from checkpoint.test_sharded import assert_equal_trees
from helpers.ranks import RankPool, ranks
from lightning import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from strategy.fits import Recipe, make_trainer

from lightning_zero import CheckpointError
from lightning_zero.checkpoint import Background, load
from lightning_zero.checkpoint.commit import Draft, Save
from lightning_zero.checkpoint.tiles import TILE, copy_to_host
from lightning_zero.integration.names import STRATEGIES
from lightning_zero.storage import InlineExecutor

RECIPE = Recipe(optimizer="adamw", steps=4, options={"lr": 0.05})


def hold_and_let_go(nbytes: int) -> tuple[int, int]:
    """By how much memory has grown while there is a copy of so many bytes, and afterwards."""
    for _ in range(2):  # the C allocator keeps blocks as large as those that it has seen freed
        torch.ones(TILE // 4)
    values, start = torch.ones(nbytes // 4), resident()
    held = copy_to_host(values.split(TILE // 4), InlineExecutor())
    above = [torch.ones(100) for _ in range(2000)]  # what training allocates meanwhile
    held_bytes = resident() - start
    del held
    return held_bytes, resident() - start - 400 * len(above)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_a_copy_gives_its_memory_back(pool1: RankPool) -> None:
    held, left = pool1.run(hold_and_let_go, 16 * TILE)[0]
    assert held >= 16 * TILE
    assert left < TILE


class Gate(Callback):
    """Lets a save complete when training has come to a step, and no sooner; who loads it then waits for that."""

    def __init__(self, step: int, path: str) -> None:
        self.step, self.path = step, path
        self.opened = threading.Event()
        self.completed_at: list[int] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            assert not self.completed_at
            self.opened.set()
            assert trainer.strategy.load_checkpoint(self.path)["global_step"] == 1


def save_while_training(strategy: dict[str, Any], path: str, until: int) -> int:
    """Save after step 1; the checkpoint is complete after step `until`. How often it was not there in between."""
    gate, complete = Gate(until, path), Draft.complete

    def completing(draft: Draft) -> None:
        assert gate.opened.wait(120)
        time.sleep(0.1)
        gate.completed_at.append(trainer.global_step)
        complete(draft)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Draft, "complete", completing)
        trainer = make_trainer(strategy, callbacks=[SaveAfter(1, path), gate])
        trainer.fit(Resumable(RECIPE))
    assert gate.completed_at or dist.get_rank()
    assert Path(path).exists()
    return min(gate.completed_at, default=until)


@ranks(2)
@pytest.mark.parametrize(("name", "container"), [("zero3", "full"), ("zero2_offload", "sharded")])
def test_training_goes_on_and_the_checkpoint_is_of_the_step(
    pool: RankPool, name: str, container: str, tmp_path: Path
) -> None:
    background, blocking = tmp_path / "a.ckpt", tmp_path / "b.ckpt"
    options = {**STRATEGIES[name], "checkpoint_format": container}
    assert min(pool.run(save_while_training, options | {"async_save": True}, str(background), 3)) >= 3
    pool.run(run, options, RECIPE, steps=4, save=(1, str(blocking)))
    if container == "full":
        # The folder in the archive is called like the temporary file.
        assert background.stat().st_size == blocking.stat().st_size
    assert_equal_trees(*(without_clock(load(path, ALONE)) for path in (background, blocking)))
    assert files_in(tmp_path) == {"a.ckpt", "b.ckpt"}


def without_clock(checkpoint: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in checkpoint.items() if key != "callbacks"}


def fail_in_background(strategy: dict[str, Any], path: str, again: bool) -> tuple[str, int]:
    """The error, and the step at which it came."""
    complete = Draft.complete

    def failing(draft: Draft) -> None:
        if draft.path == Path(path):
            raise OSError(28, "No space left on device")
        complete(draft)

    callbacks = [SaveAfter(1, path)] + [SaveAfter(3, path + ".next")] * again
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Draft, "complete", failing)
        trainer = make_trainer(strategy, callbacks=callbacks)
        try:
            trainer.fit(Resumable(RECIPE))
        except CheckpointError as error:
            return str(error), trainer.global_step
    return "saved", trainer.global_step


@ranks(2)
@pytest.mark.parametrize(("container", "again"), [("full", True), ("sharded", False)], ids=["next save", "end of fit"])
def test_errors_appear(pool: RankPool, container: str, again: bool, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    options = {**STRATEGIES["zero2"], "checkpoint_format": container, "async_save": True}
    for message, step in pool.run_within(20, fail_in_background, options, str(path), again):
        assert f"could not complete the checkpoint {path}. rank 0: OSError: [Errno 28]" in message
        assert step == (3 if again else 4)
    assert not files_in(tmp_path)


class Watch(Callback):
    """Counts complete checkpoints at every step."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.counts: list[int] = []

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.counts.append(len(list(self.folder.glob("step*"))))


def keep_one(strategy: dict[str, Any], folder: str) -> list[int]:
    watch = Watch(folder)
    keep = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=1)
    trainer = make_trainer(strategy, callbacks=[keep, watch], enable_checkpointing=True)
    trainer.fit(Resumable(RECIPE))
    trainer.test(Resumable(RECIPE), ckpt_path=keep.best_model_path)
    return watch.counts


@ranks(2)
def test_the_older_one_stays_until_the_newer_is_complete(pool: RankPool, tmp_path: Path) -> None:
    options = {**STRATEGIES["zero2"], "checkpoint_format": "sharded", "async_save": True}
    counts, _ = pool.run(keep_one, options, str(tmp_path))
    assert counts[0] == 0
    assert all(count in (1, 2) for count in counts[2:])
    (last,) = tmp_path.iterdir()
    assert last.name == "step=4.ckpt"
    assert load(last, ALONE)["global_step"] == 4


def save_elsewhere(strategy: dict[str, Any], path: str) -> list[str]:
    warned: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_zero.integration.checkpointing.rank_zero_warn", warned.append)
        trainer = make_trainer(strategy, callbacks=[SaveAfter(1, path)], plugins=[Derived()])
        trainer.fit(Resumable(RECIPE))
    return warned


@ranks(2)
@pytest.mark.parametrize("options", [{"async_save": True}, {"checkpoint_format": "sharded"}])
def test_a_writer_of_the_users_says_what_it_cannot(pool: RankPool, options: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    messages = pool.run(save_elsewhere, {**STRATEGIES["zero2"], **options}, str(path))
    assert any("Derived writes" in message for message in messages[0])
    assert load(path, ALONE)["global_step"] == 1


class Score(Callback):
    """A metric that rises, validated never."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.callback_metrics["score"] = torch.tensor(float(trainer.global_step))


def keep_best(strategy: dict[str, Any], folder: str) -> dict[str, float]:
    """Two of one name: a name that is being written counts as taken."""
    keep = ModelCheckpoint(
        folder, filename="best", monitor="score", mode="min", every_n_train_steps=1, save_top_k=2, save_last="link"
    )
    trainer = make_trainer(strategy, callbacks=[Score(), keep], enable_checkpointing=True)
    trainer.fit(Resumable(RECIPE))
    return {Path(path).name: float(score) for path, score in keep.best_k_models.items()}


@ranks(2)
def test_top_k_of_one_name_and_the_link_are_as_in_blocking_saves(pool: RankPool, tmp_path: Path) -> None:
    kept = []
    for folder, background in (("a", False), ("b", True)):
        options = {**STRATEGIES["zero2"], "checkpoint_format": "sharded", "async_save": background}
        kept.append(pool.run(keep_best, options, str(tmp_path / folder))[0])
    assert kept[0] == kept[1] == {"best.ckpt": 1.0, "best-v1.ckpt": 2.0}
    assert files_in(tmp_path / "a") == files_in(tmp_path / "b")
    steps = [load(tmp_path / folder / "last.ckpt", ALONE)["global_step"] for folder in ("a", "b")]
    assert steps[0] == steps[1]


class Uploads(DummyLogger):
    """Notes which files it would upload: after each save, as those of a run, and at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []
        self.callbacks: dict[int, Any] = {}

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        self.callbacks[id(checkpoint_callback)] = checkpoint_callback
        self.upload(checkpoint_callback)

    def upload(self, callback: Any) -> None:
        paths = [*callback.best_k_models, callback.best_model_path, callback.last_model_path]
        self.found.append((callback.__class__.__name__, [Path(path).name for path in paths if Path(path).is_file()]))

    def finalize(self, status: str) -> None:
        for callback in self.callbacks.values():
            self.upload(callback)


def save_and_upload(strategy: dict[str, Any], folder: str) -> list[Any]:
    complete = Draft.complete

    def slowly(draft: Draft) -> None:
        time.sleep(0.05)
        complete(draft)

    keep = ModelCheckpoint(
        folder, filename="{step}", monitor="score", mode="max", every_n_train_steps=1, save_top_k=2, save_last="link"
    )
    flags = {"callbacks": [Score(), keep], "logger": (logger := Uploads()), "enable_checkpointing": True}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Draft, "complete", slowly)
        make_trainer(strategy, **flags).fit(Resumable(RECIPE))
    return logger.found


@ranks(2)
def test_loggers_find_the_files_that_they_upload(pool: RankPool, tmp_path: Path) -> None:
    (blocking, _), (background, _) = (
        pool.run(save_and_upload, {**STRATEGIES["zero2"], "async_save": each}, str(tmp_path / str(each)))
        for each in (False, True)
    )
    assert background == blocking
    assert blocking[1] == ("ModelCheckpoint", ["step=1.ckpt", "step=2.ckpt", "step=2.ckpt", "last.ckpt"])
    assert len(blocking) == RECIPE.steps + 1


class SavesAtTheEnd(Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        trainer.save_checkpoint(self.path)


def save_at_teardown(strategy: dict[str, Any], path: str) -> bool:
    trainer = make_trainer(strategy, callbacks=[SavesAtTheEnd(path)])
    trainer.fit(Resumable(RECIPE))
    return Path(path).exists()


@ranks(2)
def test_a_save_that_nobody_would_wait_for_is_blocking(pool: RankPool, tmp_path: Path) -> None:
    options = {**STRATEGIES["zero2"], "checkpoint_format": "full", "async_save": True}
    assert pool.run(save_at_teardown, options, str(tmp_path / "a.ckpt")) == [True, True]


def fail_and_fit_again(strategy: dict[str, Any], path: str) -> str:
    """A fit that failed makes no difference to the errors of the next one."""
    callback = SaveAfter(3, path)

    def failing(draft: Draft) -> None:
        raise OSError(28, "No space left on device")

    trainer = make_trainer(strategy, callbacks=[callback])
    with pytest.raises(ZeroDivisionError):
        trainer.fit(Raises(RECIPE))
    trainer.fit_loop.max_epochs = 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Draft, "complete", failing)
        with pytest.raises(CheckpointError) as caught:
            trainer.fit(Resumable(RECIPE))
    return str(caught.value)


class Raises(Resumable):
    def on_train_batch_end(self, *_: Any) -> None:
        raise ZeroDivisionError


@ranks(2)
def test_errors_appear_in_a_fit_after_one_that_failed(pool: RankPool, tmp_path: Path) -> None:
    options = {**STRATEGIES["zero2"], "async_save": True}
    assert all("No space left" in m for m in pool.run(fail_and_fit_again, options, str(tmp_path / "a.ckpt")))


class Held(Save):
    """A save that is complete once it is let go."""

    path = Path("held.ckpt")

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.complete = False

    def hold(self, executor: Any) -> None:
        pass

    def _write(self, rank: int) -> None:
        assert self.let_go.wait(20)

    def _complete(self, written: Sequence[Any]) -> None:
        self.complete = True

    def abandon(self) -> None:
        pass


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C raises, whatever the process that runs the tests has made of it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_a_save_that_was_awaited_when_the_user_interrupted_is_awaited_again() -> None:
    """By the strategy's teardown, after which Lightning kills the other ranks."""
    save, background = Held(), Background(ALONE, InlineExecutor())
    background.start(save, ALONE)
    interrupt = threading.Timer(0.1, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT])
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        background.wait()
    save.let_go.set()
    background.wait()
    assert save.complete


def test_what_fails_after_a_save_on_one_rank_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    save, background = Held(), Background(ALONE, InlineExecutor())
    background.start(save, ALONE)

    def refuse() -> None:
        raise RefusedError("nobody may remove it")

    background.after(refuse)
    save.let_go.set()
    background.wait()
    assert "nobody may remove it" in caplog.text
