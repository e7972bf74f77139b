"""Checkpoints at URLs: the same contents, read by ranges, complete or not there."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint.remote import Shared, register
from checkpoint.resuming import Resumable, resume_last, run, save_at_end
from checkpoint.test_full import ALONE, RECIPE, assert_same_files, files_in
from checkpoint.test_sharded import assert_equal_trees
from helpers.ranks import RankError, RankPool, ranks
from lightning import Trainer
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, OnExceptionCheckpoint
from strategy.fits import Fitted, Recipe, assert_same, make_trainer
from torch import nn

import lightning_zero
from lightning_zero import CheckpointError, ZeroFabricStrategy
from lightning_zero.checkpoint import begin, load, locate, remote, shards
from lightning_zero.checkpoint.commit import METADATA
from lightning_zero.checkpoint.folder import FolderSave
from lightning_zero.checkpoint.lazy import StoredTensor
from lightning_zero.integration.names import STRATEGIES
from lightning_zero.sharding.memory_format import MemoryFormat
from lightning_zero.tools.contents import describe, read_checkpoint

FORMS = ("full", "sharded")


@pytest.fixture(autouse=True)
def registered() -> None:
    register()


def url(path: Path) -> str:
    return f"shared://{path}"


def saved(strategy: Any, path: str, recipe: Recipe = RECIPE) -> Fitted:
    register()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "PIECE", 1000)  # bytes: parameters and shards lie across pieces
        return save_at_end(strategy, recipe, path)


def resumed(strategy: Any, path: str) -> tuple[Fitted, int]:
    register()
    Shared.read = 0
    return run(strategy, RECIPE, steps=RECIPE.steps + 2, resume=path), Shared.read


@pytest.mark.parametrize("form", ["full", pytest.param("sharded", marks=pytest.mark.slow)])
@ranks(2)
def test_it_holds_what_a_local_one_holds_and_resumes(form: str, pool: RankPool, tmp_path: Path) -> None:
    strategy = {**STRATEGIES["zero3_offload"], "checkpoint_format": form}
    here, there = tmp_path / "here.ckpt", tmp_path / "there" / "last.ckpt"
    pool.run(saved, strategy, str(here))
    for _ in range(2):  # the second one replaces the first
        pool.run(saved, strategy, url(there))
    if form == "full":
        assert_same_files(there, here)
    else:
        assert sum(each.is_dir() for each in there.iterdir()) == 1  # that of the last save alone
        assert_equal_trees(load(there, ALONE), load(here, ALONE))  # a copy of it on this machine
    assert_equal_trees(load(locate(url(there)), ALONE), load(here, ALONE))
    for (ours, read), (theirs, _) in zip(
        pool.run(resumed, strategy, url(there)), pool.run(resumed, strategy, str(here)), strict=True
    ):
        assert_same(ours.weights, theirs.weights)
        assert read > 0
    module = lightning_zero.load_from_checkpoint(Resumable, url(there), recipe=RECIPE)
    other = lightning_zero.load_from_checkpoint(Resumable, here, recipe=RECIPE)
    assert_equal_trees(module.state_dict(), other.state_dict())


@ranks(2)
def test_state_of_whole_parameters(pool: RankPool, tmp_path: Path) -> None:
    """It lies on one rank, which sends it to rank 0 alone."""
    here, there = tmp_path / "here.ckpt", tmp_path / "there.ckpt"
    for path in (str(here), url(there)):
        pool.run(saved, "zero3", path, Recipe(optimizer="muon", steps=2))
    assert_same_files(there, here)


def resumed_last(strategy: Any, folder: str) -> list[int]:
    register()
    kinds: dict[type[Checkpoint], dict[str, Any]] = {
        ModelCheckpoint: {"save_top_k": 0},
        OnExceptionCheckpoint: {"filename": "last"},
    }
    return [resume_last(strategy, RECIPE, kind, dirpath=folder, **options) for kind, options in kinds.items()]


@pytest.mark.parametrize("form", FORMS)
@ranks(2)
def test_the_last_one_is_found(form: str, pool: RankPool, tmp_path: Path) -> None:
    """No newer one that was never completed is taken for it."""
    strategy = {**STRATEGIES["zero2"], "checkpoint_format": form}
    pool.run(saved, strategy, url(tmp_path / "last.ckpt"))
    (tmp_path / "last-v1.ckpt" / "0123456789abcdef").mkdir(parents=True)
    assert pool.run(resumed_last, strategy, url(tmp_path)) == [[RECIPE.steps] * 2] * 2


def write(form: str, tree: dict[str, Any], path: str) -> None:
    save = begin(form, tree, locate(path), (), ALONE)
    save.write(ALONE)


@pytest.fixture
def cut() -> Iterator[type[Shared]]:
    """The file system, for a test that cuts the connection."""
    yield Shared
    Shared.room = Shared.unanswered = None
    Shared.keeps = False


@pytest.fixture
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside which a small file is a large one."""
    monkeypatch.setattr(remote, "BLOCK", 1 << 11)


@pytest.mark.parametrize("form", FORMS)
def test_a_connection_that_is_cut_anywhere_leaves_the_older_one(form: str, tmp_path: Path, cut: type[Shared]) -> None:
    path = tmp_path / "last.ckpt"
    older, newer = (
        {"state_dict": {"w": torch.full((300,), n), "b": torch.arange(n + 3)}, "epoch": n} for n in (0.0, 1.0)
    )
    cut.room = 1 << 30
    write(form, newer, url(tmp_path / "counted.ckpt"))
    written = (1 << 30) - cut.room
    for room in (*range(0, written, written // 9), written - 1):
        cut.room = None
        write(form, older, url(path))
        cut.room = room
        with pytest.raises(CheckpointError, match="the connection was cut"):
            write(form, newer, url(path))
        cut.room = None
        found = load(locate(url(path)), ALONE)
        # Of a folder what follows `.metadata` is for other programs: it is complete before.
        complete = form == "sharded" and found["epoch"] == 1.0
        assert not complete or room > written // 2
        assert_equal_trees(found, newer if complete else older)
        assert_equal_trees(read_checkpoint(path)[0], found)  # by the tools, from a copy on this machine
    files = [each for each in (path.rglob("*") if path.is_dir() else [path]) if each.is_file()]
    assert describe(path).file_bytes == sum(each.stat().st_size for each in files)
    assert {each.name for each in tmp_path.iterdir()} == {"last.ckpt", "counted.ckpt"}


@pytest.mark.parametrize("form", FORMS)
def test_a_save_that_got_no_answer_is_whole(form: str, tmp_path: Path, cut: type[Shared]) -> None:
    """Its last object has arrived, but it cannot know that."""
    path = tmp_path / "last.ckpt"
    older, newer = ({"state_dict": {"w": torch.full((300,), n)}, "epoch": n} for n in (0.0, 1.0))
    write(form, older, url(path))
    cut.unanswered = METADATA if form == "sharded" else path.name
    with pytest.raises(CheckpointError, match="no answer came"):
        write(form, newer, url(path))
    cut.unanswered = None
    assert_equal_trees(load(locate(url(path)), ALONE), newer)
    write(form, older, url(path))
    assert form == "full" or sum(each.is_dir() for each in path.iterdir()) == 1  # nothing stays of the others


def test_where_its_remains_cannot_be_removed_the_error_of_the_save_stays(tmp_path: Path, cut: type[Shared]) -> None:
    cut.room, cut.keeps = 100, True
    with pytest.raises(CheckpointError, match="the connection was cut"):
        write("sharded", {"state_dict": {"w": torch.ones(300)}}, url(tmp_path / "last.ckpt"))


def test_a_save_that_another_one_has_overtaken_fails(tmp_path: Path) -> None:
    """Two runs save to one URL; the one that ends first removes the files of the other."""
    path = tmp_path / "last.ckpt"
    slow, fast = ({"state_dict": {"w": torch.full((300,), n)}} for n in (0.0, 1.0))
    complete = FolderSave._complete

    def overtaken(save: FolderSave, written: Any) -> None:
        patch.undo()
        write("sharded", fast, url(path))
        complete(save, written)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FolderSave, "_complete", overtaken)
        with pytest.raises(CheckpointError, match=r"no longer has .*another run"):
            write("sharded", slow, url(path))
    assert_equal_trees(load(locate(url(path)), ALONE), fast)
    assert sum(each.is_dir() for each in path.iterdir()) == 1


def test_a_part_of_a_file_is_read_without_the_rest(tmp_path: Path, short_blocks: None) -> None:
    path, weights = tmp_path / "large.ckpt", torch.randn(1 << 20)
    transposed = torch.randn(300, 200).t()
    write("full", {"state_dict": {"w": weights, "t": transposed, "small": torch.ones(3)}}, url(path))
    Shared.read = 0
    found = load(locate(url(path)), ALONE, checksums=False)["state_dict"]
    assert type(found["small"]) is torch.Tensor  # whoever keeps it keeps no file
    assert isinstance(found["w"], StoredTensor)
    part = torch.empty(1000)
    MemoryFormat.of(weights).read(found["w"], 5000, part)
    assert torch.equal(part, weights[5000:6000])
    assert Shared.read < path.stat().st_size // 8
    rows = torch.empty(700)
    MemoryFormat(transposed.shape, transposed.contiguous().stride()).read(found["t"], 100, rows)
    assert torch.equal(rows, transposed.reshape(-1)[100:800])
    assert found["t"].stride() == transposed.stride()
    assert torch.equal(found["t"], transposed)


@pytest.mark.parametrize("form", FORMS)
def test_what_describes_a_checkpoint_is_read_without_it(form: str, tmp_path: Path, short_blocks: None) -> None:
    """Directories, headers and small tensors, wherever they lie; to verify it, everything once."""
    path = tmp_path / "many.ckpt"
    write(form, {"state_dict": {f"{n}": torch.randn(3 if n % 2 else 1 << 16) for n in range(16)}}, url(path))
    size = sum(each.stat().st_size for each in path.rglob("*")) if path.is_dir() else path.stat().st_size
    for checksums, least, most in ((False, 0.0, 0.125), (True, 0.9, 1.125)):
        Shared.read = 0
        load(locate(url(path)), ALONE, checksums=checksums)
        assert least < Shared.read / size < most


def test_tensors_with_gaps_are_saved_again(tmp_path: Path) -> None:
    columns, rows = torch.randn(300, 500)[:, :200], torch.randn(300).expand(200, 300)
    torch.save(tree := {"state_dict": {"columns": columns, "rows": rows}}, tmp_path / "a.ckpt")
    for form in FORMS:
        write(form, load(locate(url(tmp_path / "a.ckpt")), ALONE), url(tmp_path / form))
        assert_equal_trees(load(locate(url(tmp_path / form)), ALONE), tree)


@pytest.mark.parametrize("form", FORMS)
def test_what_user_code_keeps_of_a_replaced_checkpoint(form: str, tmp_path: Path) -> None:
    """It is read before it is replaced; what nobody keeps is not."""
    path = url(tmp_path / "last.ckpt")
    best, weights = torch.randn(1 << 17), torch.randn(1 << 20)
    write(form, {"state_dict": {"w": weights, "v": weights}, "best": {"w": best, "v": best[1:]}}, path)
    found = load(locate(path), ALONE, checksums=False)
    kept, unsaved = found["best"]["w"], found["best"]["v"]
    del found
    Shared.read = 0
    for _ in range(2):
        write(form, {"state_dict": {"w": weights}, "best": {"w": kept}}, path)
    assert Shared.read < weights.nbytes
    assert torch.equal(unsaved, best[1:])
    assert_equal_trees(load(locate(path), ALONE), {"state_dict": {"w": weights}, "best": {"w": best}})


@pytest.mark.parametrize("form", FORMS)
def test_damage_is_found_and_named(form: str, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    write(form, {"state_dict": {"weight": torch.full((50_000,), 1.5)}}, url(path))
    (file,) = [each for each in (path.rglob("*") if path.is_dir() else [path]) if each.suffix in (".distcp", ".ckpt")]
    data = bytearray(file.read_bytes())
    data[100_000] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"is damaged: the checksum of .*weight"):
        load(locate(url(path)), ALONE)


def test_what_is_there_already_is_not_taken_for_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file")
    (tmp_path / "folder" / "inside").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="file is a file; remove it"):
        write("sharded", {"state_dict": {"w": torch.ones(3)}}, url(tmp_path / "file"))
    for form in FORMS:
        with pytest.raises(CheckpointError, match="folder is a folder; remove it"):
            write(form, {"state_dict": {"w": torch.ones(3)}}, url(tmp_path / "folder"))
    (tmp_path / "killed" / "0123456789abcdef").mkdir(parents=True)  # of a save that never became complete
    for name in ("logs/0123", "notes.txt"):
        write("sharded", {"state_dict": {"w": torch.ones(3)}}, url(tmp_path / "killed"))
        (tmp_path / "killed" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "killed" / name).write_text("the user's")
    write("sharded", {"state_dict": {"w": torch.ones(3)}}, url(tmp_path / "killed"))
    assert {"logs", "notes.txt"} < {each.name for each in (tmp_path / "killed").iterdir()}
    assert sum(each.is_dir() for each in (tmp_path / "killed").iterdir()) == 2
    with pytest.raises(FileNotFoundError):
        load(locate(url(tmp_path / "nothing.ckpt")), ALONE)
    (tmp_path / "begun" / "0123").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=METADATA):
        load(locate(url(tmp_path / "begun")), ALONE)
    assert isinstance(locate(f"file://{tmp_path}/a.ckpt"), Path)


def saved_beside_training(strategy: dict[str, Any], path: str) -> list[str]:
    register()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run(strategy, RECIPE, steps=RECIPE.steps, save=(1, path))
    return [str(warning.message) for warning in said]


@ranks(2)
def test_folders_are_written_beside_the_training_and_files_are_not(pool: RankPool, tmp_path: Path) -> None:
    for form in FORMS:
        path, strategy = tmp_path / form, {**STRATEGIES["zero2"], "async_save": True, "checkpoint_format": form}
        said = pool.run(saved_beside_training, strategy, url(path))[0]
        assert any("needs checkpoint_format='sharded'" in text for text in said) == (form == "full")
        assert load(locate(url(path)), ALONE)["global_step"] == 1


def cut_on_one_rank(strategy: dict[str, Any], path: str, rank: int) -> str:
    register()
    trainer: Trainer = make_trainer(strategy)
    trainer.fit(Resumable(RECIPE))
    Shared.room = 5000 if trainer.global_rank == rank else None
    try:
        trainer.save_checkpoint(path)
    except CheckpointError as error:
        return str(error)
    finally:
        Shared.room = None
    return "nothing failed"


@pytest.mark.parametrize("form", FORMS)
@ranks(2)
def test_a_rank_that_fails_fails_the_save_on_all(form: str, pool: RankPool, tmp_path: Path) -> None:
    strategy = {**STRATEGIES["zero3"], "checkpoint_format": form}
    for said in pool.run(cut_on_one_rank, strategy, url(tmp_path / "a.ckpt"), 0 if form == "full" else 1):
        assert "the connection was cut" in said
    assert not (tmp_path / "a.ckpt" / METADATA).exists()


def save_unreadable(path: str, rank: int, report: str) -> None:
    """Save where the values of one rank cannot be read; its process ends with the error, which it reports before."""
    register()
    trainer = make_trainer("zero3")
    trainer.fit(Resumable(RECIPE))
    with pytest.MonkeyPatch.context() as patch:
        if trainer.global_rank == rank:
            patch.setattr(shards.SharedValues, "gather_piece", unreadable)
        try:
            trainer.save_checkpoint(path)
        except OSError as error:
            Path(report).write_text(str(error))
            os._exit(1)


def unreadable(values: shards.SharedValues, number: int) -> None:
    raise OSError(5, "the state cannot be read")


@pytest.mark.parametrize("rank", [0, 1])
@ranks(2)
def test_an_error_while_others_gather_is_that_of_its_rank(rank: int, pool: RankPool, tmp_path: Path) -> None:
    """It does not wait for them first: they wait for it."""
    report = tmp_path / "said"
    with pytest.raises(RankError):
        pool.run_within(10, save_unreadable, url(tmp_path / "a.ckpt"), rank, str(report))
    assert "the state cannot be read" in report.read_text()
    assert files_in(tmp_path) == {"said"}


def saved_under_own_names(folder: str) -> None:
    """Each rank gives another name, as with a metric in it that the ranks do not share."""
    register()
    name = f"{folder}/%s-{dist.get_rank()}.ckpt"
    trainer = make_trainer({"stage": 2, "checkpoint_format": "sharded"})
    trainer.fit(Resumable(RECIPE))
    trainer.save_checkpoint(name % "trainer")
    fabric = Fabric(accelerator="cpu", devices=2, strategy=ZeroFabricStrategy(2, checkpoint_format="sharded"))
    fabric.launch()
    fabric.save(name % "fabric", {"state_dict": fabric.setup(nn.Linear(8, 8))})


@ranks(2)
def test_all_ranks_write_under_the_name_that_rank_0_gives(pool: RankPool, tmp_path: Path) -> None:
    pool.run(saved_under_own_names, url(tmp_path))
    assert files_in(tmp_path) == {"trainer-0.ckpt", "fabric-0.ckpt"}
    for name in files_in(tmp_path):
        assert all(value.isfinite().all() for value in load(tmp_path / name, ALONE)["state_dict"].values())
