"""State on a disk under the Trainer: the same training, ordinary checkpoints, and errors that end it in good time."""

from __future__ import annotations

import dataclasses
import errno
import functools
import os
import re
import signal
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from callbacks.test_ema import EACH_STEP, Various, fit_averaged, floating
from helpers import models, place
from helpers.ranks import RankError, RankPool, slow_unless
from lightning import Callback, LightningModule, Trainer
from lightning.fabric import Fabric
from strategy.fits import DDP, Fitted, Lit, Recipe, assert_same, fit, make_trainer
from strategy.test_edits import VISIBLE, Edited, assert_same_after_every_batch, assign_data, from_vector, write_data
from strategy.test_gradients_of_users import FAST, Assigned, ByHand, Changes, Scaled, half, to_floats

from lightning_zero import DynamicLossScaler, ZeroFabricStrategy, ZeroStrategy, ops
from lightning_zero.engine import Engine
from lightning_zero.integration import disk as integration_disk
from lightning_zero.integration.disk import warn_of
from lightning_zero.integration.names import STRATEGIES
from lightning_zero.planning import Bytes
from lightning_zero.planning.memory import held_by, planned_parts
from lightning_zero.storage import DiskError, DiskStore
from lightning_zero.storage.disk_file import DiskFile
from lightning_zero.storage.disk_speed import Way, usual_way
from lightning_zero.storage.run_folder import FileSystem

NVME = [name for name in STRATEGIES if name.endswith("_nvme")]
BUFFER_GB = 2.0**-12  # tiles of 4096 elements, the smallest there are
RECIPE = Recipe(micro=2, steps=3)


def nvme(name: str, path: Path, **options: Any) -> dict[str, Any]:
    """Arguments of a strategy that rests its state at a path; its small parameters are sharded, too."""
    return STRATEGIES[name] | {"nvme_path": str(path), "nvme_buffer_gb": BUFFER_GB, "persistence_numel": 0} | options


def fits(path: Path) -> list[tuple[str, Any, Any]]:
    """Weights and optimizer state of every name, and of the same with the state in host memory."""
    found = []
    for name in NVME:
        host = STRATEGIES[name.replace("nvme", "offload")] | {"persistence_numel": 0}
        disk, memory = (
            fit(options, RECIPE, gradient_clip_val=0.3, accumulate_grad_batches=2)
            for options in (nvme(name, path, offload_gradients="nvme"), host)
        )
        found.append((name, (disk.weights, disk.optimizer_states), (memory.weights, memory.optimizer_states)))
    return found


def test_every_name_trains_as_with_state_in_host_memory(pool2: RankPool, tmp_path: Path) -> None:
    for name, disk, host in pool2.run(fits, tmp_path)[0]:
        torch.testing.assert_close(disk, host, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")


def save_and_resume(names: tuple[str, str], path: Path, container: str, **changes: Any) -> dict[str, torch.Tensor]:
    """A checkpoint written with the first, and resumed with the second."""
    first, second = ({**options_of(name, path), "checkpoint_format": container, **changes} for name in names)
    trainer, lit = make_trainer(first, accumulate_grad_batches=2), Lit(RECIPE)
    trainer.fit(lit)
    trainer.save_checkpoint(checkpoint := str(path / f"{'-'.join(names)}.ckpt"))
    return fit(second, dataclasses.replace(RECIPE, steps=5), ckpt_path=checkpoint).weights


def options_of(name: str, path: Path) -> dict[str, Any]:
    return nvme(name, path) if name in NVME else STRATEGIES[name] | {"persistence_numel": 0}


@pytest.mark.parametrize("container", slow_unless(["sharded"], ["full", "sharded"]))
def test_checkpoints_are_those_of_any_other_place(pool2: RankPool, tmp_path: Path, container: str) -> None:
    pairs = [("zero2_nvme", "zero3_offload"), ("zero2_offload", "zero3_nvme"), ("zero2_offload", "zero3_offload")]
    into_host, into_disk, expected = (pool2.run(save_and_resume, names, tmp_path, container)[0] for names in pairs)
    assert_same(into_host, expected)
    assert_same(into_disk, expected)


def fit_in_a_way_that_was_found(path: Path) -> tuple[Any, list[Way]]:
    """Weights, and the ways of transfers that this rank has made pools for."""
    made = list[Way]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(integration_disk, "_PROBED_BYTES", 1)
        patch.setattr(Way, "pool", lambda way: (made.append(way), ops.DiskPool(*way))[1])
        # Of this rank alone: the others take what the first of the machine has found.
        patch.setattr(DiskStore, "choose_way", lambda *_: Way(2, 4096 << torch.distributed.get_rank()))
        return fit(nvme("zero2_nvme", path), RECIPE).weights, made


def test_ranks_of_a_machine_take_the_way_that_one_has_found(pool2: RankPool, tmp_path: Path) -> None:
    (weights, made), (_, theirs) = pool2.run(fit_in_a_way_that_was_found, tmp_path)
    assert made == theirs == [usual_way(), Way(2, 4096)]
    expected = pool2.run(fit, nvme("zero2_nvme", tmp_path), RECIPE)[0]
    assert_same(weights, expected.weights)


@pytest.mark.slow
def test_checkpoints_move_between_a_disk_and_the_device(pool2: RankPool, tmp_path: Path) -> None:
    """With torch's kernels in both places."""
    pairs = [("zero2", "zero3_nvme"), ("zero3_nvme", "zero2"), ("zero2", "zero2")]
    results = [pool2.run(save_and_resume, names, tmp_path, "full", native_optimizer="off")[0] for names in pairs]
    for weights in results[:2]:
        assert_same(weights, results[2])


def test_edits_of_parameters_on_a_disk_count(pool2: RankPool, tmp_path: Path) -> None:
    edits = [*VISIBLE, from_vector, assign_data, write_data]
    recipe = Recipe(optimizer="momentum", steps=len(edits) + 2)
    module = functools.partial(Edited, edits=edits)
    expected, actual = (pool2.run(fit, name, recipe, module)[0] for name in (DDP, nvme("zero3_nvme", tmp_path)))
    assert_same_after_every_batch(actual, expected, edits)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "recipe", "flags"),
    [
        (Changes, Recipe("optional", "momentum", {"lr": 0.5}, flagged=models.by_turns), {}),
        (ByHand, FAST, {"precision": "bf16-mixed"}),
        (Assigned, FAST, {"precision": "bf16-mixed"}),
        (Scaled, FAST, half(DynamicLossScaler(2.0**40, hysteresis=1, backoff_factor=2.0**-15))),
    ],
    ids=["changes", "manual", "assigned", "fp16"],
)
def test_what_is_done_to_gradients_on_a_disk_counts(
    pool2: RankPool, tmp_path: Path, module: type[LightningModule], recipe: Recipe, flags: dict[str, Any]
) -> None:
    """As to those in host memory: read and changed in place, assigned, by optimizers by turns, with an overflow."""
    places = STRATEGIES["zero2_offload"], nvme("zero2_nvme", tmp_path, offload_gradients="nvme")
    expected, actual = (pool2.run(fit, place, recipe, module, **flags) for place in places)
    for one, other in zip(actual, expected, strict=True):
        assert_same(one.weights, other.weights)
        assert [to_floats(note) for note in one.notes] == [to_floats(note) for note in other.notes]


def test_an_average_of_parameters_on_a_disk_is_lightnings(pool2: RankPool, tmp_path: Path) -> None:
    """Validated and restored after every step."""
    recipe = Recipe(model="frozen", optimizer="momentum", steps=5)
    expected, actual = (
        pool2.run(fit_averaged, name, recipe, Various, {}, **EACH_STEP)[0]
        for name in (DDP, nvme("zero3_nvme", tmp_path))
    )
    assert_same(floating(actual.weights), floating(expected.weights))
    assert actual.notes == expected.notes


class Look(Callback):
    """Notes what is held and planned, and what is in the folder."""

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        assert isinstance(trainer.strategy, ZeroStrategy)
        assert trainer.strategy.memory is not None
        if trainer.global_step == 2:
            store = trainer.strategy.engine.placement.optimizer_store
            assert isinstance(store, DiskStore)
            self.held, self.planned = held_by(trainer.strategy.engine), planned_parts(trainer.strategy.memory.plan)
            self.size, self.report = store.opened.path.stat().st_size, str(trainer.strategy.memory.plan)
            self.folder = store.opened.path.parent


def look(name: str, path: Path, gradients: str) -> tuple[dict[str, Bytes], dict[str, Bytes], int, str, str]:
    look = Look()
    options = nvme(name, path, offload_gradients=gradients)
    trainer = make_trainer(options, accumulate_grad_batches=RECIPE.micro, callbacks=[look])
    trainer.fit(Lit(RECIPE))
    assert look.folder.is_dir()  # for checkpoints, a test or another fit
    trainer.strategy.release()  # type: ignore[attr-defined]
    return look.held, look.planned, look.size, look.report, look.folder.relative_to(path).as_posix()


@pytest.mark.parametrize(
    ("name", "values", "gradients"), [("zero2_nvme", "masters", "auto"), ("zero3_nvme", "param_shards", "nvme")]
)
def test_a_plan_knows_the_bytes_on_the_disk(
    pool2: RankPool, tmp_path: Path, name: str, values: str, gradients: str
) -> None:
    for rank, (held, planned, size, report, folder) in enumerate(pool2.run(look, name, tmp_path, gradients)):
        for part in ("param_shards", "masters", "optimizer_state", "sharded_gradient"):
            assert held[part] == planned[part], part
        assert held["optimizer_state"].disk == 2 * held[values].disk > 0
        assert (held["sharded_gradient"].host > 0) == (gradients == "auto")
        assert 0 < held["staging"].host <= planned["staging"].host <= BUFFER_GB * 2**30
        disk = sum(part.disk for part in planned.values())
        assert disk <= size <= disk + 4096 * 100  # extents end with pages
        pinned = ["pinned"] if any(part.pinned for part in planned.values()) else []
        assert report.splitlines()[0].split() == ["MiB", "device", "host", "disk", *pinned]
        assert re.fullmatch(rf"lightning_zero-[\w-]+/rank{rank}", folder)
    assert not [*tmp_path.iterdir()]


class GoElsewhere(Callback):
    """Changes the working folder of the process."""

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        os.chdir("/")


def fit_beside(path: Path) -> None:
    """With the path of the disk relative to the folder of the process."""
    os.chdir(path)
    trainer = make_trainer(nvme("zero2_nvme", Path("disk")), callbacks=[GoElsewhere()])
    trainer.fit(Lit(Recipe(steps=1)))
    assert [*(path / "disk").iterdir()]
    trainer.strategy.release()  # type: ignore[attr-defined]


def test_a_relative_path_is_found_again(pool1: RankPool, tmp_path: Path) -> None:
    (disk := tmp_path / "disk").mkdir()
    pool1.run(fit_beside, tmp_path)
    assert not [*disk.iterdir()]


class FillTheDisk(Callback):
    """Saves a checkpoint after two steps; on one rank the disk is full from then on."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.checkpoint)
            if trainer.global_rank == 1:
                store = trainer.strategy.engine.placement.optimizer_store  # type: ignore[attr-defined]
                os.dup2(os.open("/dev/full", os.O_RDWR), store.opened.descriptor)


def fill_the_disk(path: Path) -> None:
    options = nvme("zero2_nvme", path, nvme_checksums=False, offload_gradients="nvme")
    fit(options, Recipe(steps=8), callbacks=[FillTheDisk(path / "before.ckpt")])


def fit_and_load(path: Path) -> list[Any]:
    """What two steps have made, and what a checkpoint has of it."""
    found = [
        fit(nvme("zero2_nvme", path), Recipe(steps=8), ckpt_path=checkpoint, max_steps=2)
        for checkpoint in (None, str(path / "before.ckpt"))
    ]
    return [(each.weights, each.optimizer_states) for each in found]


@pytest.mark.slow  # the other rank hangs until its pool ends it
def test_a_disk_that_fills_up_ends_the_run(pool2: RankPool, tmp_path: Path) -> None:
    """The checkpoint before loads."""
    with pytest.raises(RankError) as caught:
        pool2.run_within(30.0, fill_the_disk, tmp_path)
    failure = caught.value.failures[1]
    assert failure.kind == "DiskError"
    place = r"the gradients of .* could not be written to .*rank1/state\.bin at byte [\d,]+: No space left on device; "
    bytes_of = r"it needs [\d,]+ bytes, and the file system has [\d,]+ free\. .*choose another disk"
    assert re.search(place + bytes_of, failure.message), failure.message
    expected, loaded = pool2.run(fit_and_load, tmp_path)[0]
    torch.testing.assert_close(loaded, expected, rtol=0, atol=0)


class DieWriting(Callback):
    """Saves a checkpoint after two steps. From then on rank 1 kills itself when it has written a few tiles more."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step != 2:
            return
        trainer.save_checkpoint(self.checkpoint)
        if trainer.global_rank == 1:
            write, left = DiskFile.write, iter(range(3))

            def die(*transfer: Any) -> None:
                if next(left, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)
                write(*transfer)

            DiskFile.write = die  # type: ignore[method-assign]


def die_writing(path: Path) -> None:
    fit(
        nvme("zero2_nvme", path, offload_gradients="nvme"),
        Recipe(steps=8),
        callbacks=[DieWriting(path / "before.ckpt")],
    )


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_run(pool2: RankPool, tmp_path: Path) -> None:
    """Nobody waits for it. The checkpoint before loads, and the next run removes what the dead one has left."""
    with pytest.raises(RankError) as caught:
        pool2.run_within(30.0, die_writing, tmp_path)
    assert "timeout" not in {failure.kind for failure in caught.value.failures.values()}
    (left,) = tmp_path.glob("lightning_zero-*/rank1/state.bin")
    expected, loaded = pool2.run(fit_and_load, tmp_path)[0]
    torch.testing.assert_close(loaded, expected, rtol=0, atol=0)
    assert not left.parent.parent.exists()


class FitInside(Callback):
    """Runs another fit in the middle of this one, with state in the same folder of a disk."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            before = {*self.path.iterdir()}
            self.fitted = fit(nvme("zero2_nvme", self.path, offload_gradients="nvme"), Recipe(steps=3))
            assert {*self.path.iterdir()} > before


def fit_two(path: Path) -> list[Fitted]:
    """A fit in host memory, one in which another runs on a disk, and that other."""
    inside = FitInside(path)
    outside = fit(nvme("zero2_nvme", path, offload_gradients="nvme"), Recipe(steps=3), callbacks=[inside])
    return [fit("zero2_offload", Recipe(steps=3)), outside, inside.fitted]


def test_two_runs_share_a_path(pool1: RankPool, tmp_path: Path) -> None:
    alone, *both = pool1.run(fit_two, tmp_path)[0]
    for each in both:
        assert_same(each.weights, alone.weights)


def fit_warned(path: Path) -> str:
    """What warnings say of a file system that refuses O_DIRECT, and of saves that copy the state."""
    real = os.open

    def refuse(path: Path, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "refused")
        return real(path, flags, *mode)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        patch.setattr(os, "open", refuse)
        fit(nvme("zero2_nvme", path, async_save=True), Recipe(steps=1))
    return "\n".join(str(warning.message) for warning in warned)


def test_what_costs_memory_or_time_is_said(pool1: RankPool, tmp_path: Path) -> None:
    (said,) = pool1.run(fit_warned, tmp_path)
    assert "refuses O_DIRECT" in said
    assert "async_save=True copies the state that rests on the disk to host memory" in said


def fit_at(path: str) -> None:
    fit({"stage": 2, "offload_optimizer": "nvme", "nvme_path": path})


def test_a_path_that_is_missing_or_too_small_is_refused_on_all_ranks(pool2: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"is not a folder that exists\. nvme_path=") as caught:
        pool2.run(fit_at, str(tmp_path / "missing"))
    assert {failure.kind for failure in caught.value.failures.values()} == {"DiskError"}


def test_options_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LIGHTNING_ZERO_NVME_PATH", raising=False)
    with pytest.raises(ValueError, match="offload_optimizer='nvme' needs nvme_path"):
        ZeroStrategy(offload_optimizer="nvme")
    with pytest.raises(ValueError, match="nvme_buffer_gb=0 must be a number of GiB"):
        ZeroStrategy(offload_optimizer="nvme", nvme_path="/local", nvme_buffer_gb=0)
    with pytest.raises(TypeError, match="nvme_path=3 must be the path of a folder"):
        ZeroStrategy(offload_optimizer="nvme", nvme_path=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="nvme_checksums='no' must be True or False"):
        ZeroStrategy(nvme_checksums="no")  # type: ignore[arg-type]
    assert ZeroStrategy(offload_optimizer="nvme", nvme_path=tmp_path).nvme_path == str(tmp_path)  # type: ignore[arg-type]
    monkeypatch.setenv("LIGHTNING_ZERO_NVME_PATH", "/local")
    strategy = Trainer(strategy="zero3_nvme", accelerator="cpu", logger=False, enable_checkpointing=False).strategy
    assert isinstance(strategy, ZeroStrategy)
    assert (strategy.stage, strategy.nvme_path, strategy.offload_params) == (3, "/local", "nvme")


def test_what_makes_a_disk_a_bad_place_is_said() -> None:
    for system, direct, words in (
        (FileSystem("nfs4"), True, "crosses the network"),
        (FileSystem("overlay"), False, "refuses O_DIRECT"),
    ):
        with pytest.warns(UserWarning, match=words):
            warn_of(Path("/local"), system, direct, [])
    with pytest.warns(UserWarning, match="shared by several nodes"):
        warn_of(Path("/local"), FileSystem("ext4"), True, [Path("/")])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of(Path("/local"), FileSystem("ext4"), True, [Path("/missing")])
        warn_of(Path("/local"), FileSystem("tmpfs"), False, [])  # which has been said before


def fit_in_memory(path: Path) -> str:
    """What was said before room was taken on a file system in memory, where there was none."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        patch.setattr(integration_disk, "file_system", lambda _: FileSystem("tmpfs"))
        patch.setattr(DiskStore, "reserve", mock.Mock(side_effect=DiskError(errno.ENOSPC, "no room", str(path))))
        with pytest.raises(DiskError, match="no room"):
            fit(nvme("zero2_nvme", path), Recipe(steps=1))
    return "\n".join(str(warning.message) for warning in warned)


def test_a_file_system_in_memory_is_named_before_it_is_filled(pool1: RankPool, tmp_path: Path) -> None:
    assert "is on tmpfs, a file system in host memory" in pool1.run(fit_in_memory, tmp_path)[0]


class Room(Lit):
    """Notes before its first step how many bytes are reserved on the disk."""

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor | None:
        self.notes.append(disk_of(self.trainer.strategy.engine).nbytes)  # type: ignore[attr-defined]
        return super().training_step(batch, index)


def disk_of(engine: Engine) -> DiskFile:
    store = engine.placement.optimizer_store
    assert isinstance(store, DiskStore)
    return store.opened


def fit_after_an_evaluation(path: Path) -> tuple[int, int]:
    """The bytes that are reserved before the first step, and those that rest on the disk after the last."""
    trainer, lit = make_trainer(nvme("zero3_nvme", path), limit_val_batches=1), Room(RECIPE)
    trainer.validate(lit, verbose=False)
    trainer.fit(lit)
    return lit.notes[0], disk_of(trainer.strategy.engine).given  # type: ignore[attr-defined]


def train_with_fabric(path: Path) -> tuple[int, int]:
    """The same of a step under Fabric."""
    strategy = ZeroFabricStrategy(**nvme("zero2_nvme", path))
    fabric = Fabric(accelerator=place.accelerator(), devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    model = RECIPE.make_model()
    sharded, optimizer = fabric.setup(model, RECIPE.make_optimizer(model))
    disk = disk_of(strategy.engines[0])
    reserved = disk.nbytes
    (batches, *_), *_ = RECIPE.batches(fabric.world_size)
    fabric.backward(models.next_token_loss(sharded, batches[fabric.global_rank]))
    optimizer.step()
    return reserved, disk.given


def test_room_is_reserved_before_the_first_step(pool2: RankPool, tmp_path: Path) -> None:
    """Also of a fit whose evaluation before it needed less, and under Fabric."""
    for run in (fit_after_an_evaluation, train_with_fabric):
        for reserved, resting in pool2.run(run, tmp_path):
            assert reserved >= resting > 0


def fit_without_room(path: Path) -> str:
    """The error of a fit after an evaluation, where the disk of rank 1 has no room left."""
    trainer, lit = make_trainer(nvme("zero3_nvme", path), limit_val_batches=1), Lit(RECIPE)
    trainer.validate(lit, verbose=False)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(DiskStore, "reserve", mock.Mock(side_effect=DiskError(errno.ENOSPC, "no room", str(path))))
        with pytest.raises(DiskError) as caught:
            trainer.fit(lit)
    return str(caught.value)


def test_a_disk_that_has_no_room_after_an_evaluation_ends_the_fit_on_all_ranks(pool2: RankPool, tmp_path: Path) -> None:
    first, second = pool2.run(fit_without_room, tmp_path)
    assert "rank 1: no room" in first
    assert "no room" in second
