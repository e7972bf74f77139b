"""The folder that all ranks write: who can read it, what it costs, and faults."""

from __future__ import annotations

import errno
import io
import itertools
import json
import math
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint.resuming import Global, Resumable, resume_last, run, save_after_fit, save_at_end
from checkpoint.test_full import ALONE, RECIPE, Derived, files_in
from helpers.ranks import RankError, RankPool, ranks, slow_unless
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from safetensors.torch import load_file
from strategy.fits import Fitted, Recipe, assert_same, make_trainer
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import MetadataIndex
from typer.testing import CliRunner, Result

import lightning_zero
from lightning_zero import CheckpointError
from lightning_zero.checkpoint import begin, commit, load
from lightning_zero.checkpoint import folder as folder_container
from lightning_zero.checkpoint.boxes import Box, boxes_of_slice, view_as_box
from lightning_zero.checkpoint.commit import META, METADATA, Draft, recover, recover_all, remove, remove_leftovers
from lightning_zero.checkpoint.tiles import TILE
from lightning_zero.cli import app
from lightning_zero.integration.names import STRATEGIES
from lightning_zero.sharding import Mesh
from lightning_zero.sharding.memory_format import MemoryFormat


def sharded(name: str, **options: Any) -> dict[str, Any]:
    """A registered strategy that saves into folders."""
    return {**STRATEGIES[name], "checkpoint_format": "sharded", **options}


# --------------------------------------------------------------------------------------------------------------- boxes


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Numbered in the order of memory, with dimensions in any order."""
    shape = draw(st.lists(st.integers(1, 5), max_size=4))
    order = draw(st.permutations(range(len(shape))))
    return torch.arange(math.prod(shape)).view(shape).permute(order)


@given(tensors(), st.data())
def test_boxes_make_up_a_slice_in_its_order(tensor: Tensor, data: st.DataObject) -> None:
    form = MemoryFormat.of(tensor)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, tensor.numel())] * 2)))
    values, boxes = form.flatten(tensor)[start:stop], list(boxes_of_slice(form, start, stop))
    assert len(boxes) <= max(1, 2 * tensor.dim() - 1)
    for box, part in zip(boxes, values.split([box.numel for box in boxes]), strict=True):
        assert torch.equal(view_as_box(part, box, form), box.of(tensor))


@given(st.lists(st.tuples(*[st.integers(0, 6)] * 4), max_size=3))
def test_the_intersection_of_boxes(edges: list[tuple[int, int, int, int]]) -> None:
    first = Box(tuple(min(a, b) for a, b, _, _ in edges), tuple(abs(a - b) for a, b, _, _ in edges))
    second = Box(tuple(min(c, d) for _, _, c, d in edges), tuple(abs(c - d) for _, _, c, d in edges))
    counts = torch.zeros([6] * len(edges))
    for box in (first, second):
        box.of(counts).add_(1)
    both = first.intersection(second)
    expected = counts == 2
    assert int(expected.sum()) == (0 if both is None else both.numel)
    if both is not None:
        assert expected[tuple(slice(o, o + n) for o, n in zip(both.offsets, both.sizes, strict=True))].all()


# ------------------------------------------------------------------------------------------------------------ contents


def part_of(folder: Path, rank: int) -> Path:
    """The file of a rank; the identification of the save is in its name."""
    (part,) = folder.glob(f"__{rank}_0*.distcp")
    return part


@pytest.mark.slow
@ranks(2)
def test_lightning_consolidates_it(pool: RankPool, tmp_path: Path) -> None:
    folder, file, one = tmp_path / "folder.ckpt", tmp_path / "file.ckpt", tmp_path / "one.ckpt"
    pool.run(save_at_end, sharded("zero3"), RECIPE, str(folder))
    pool.run(save_at_end, "zero3", RECIPE, str(file))
    tool = "lightning.pytorch.utilities.consolidate_checkpoint"
    subprocess.run([sys.executable, "-m", tool, str(folder), "--output_file", str(one)], check=True)
    assert_equal_trees(torch.load(one, weights_only=True), torch.load(file, weights_only=True))


@ranks(2, slow=(4,))
def test_it_holds_what_the_file_holds(pool: RankPool, tmp_path: Path) -> None:
    name = "zero3"
    folder, file = tmp_path / "folder.ckpt", tmp_path / "file.ckpt"
    pool.run(save_at_end, sharded(name), RECIPE, str(folder))
    pool.run(save_at_end, name, RECIPE, str(file))
    one, other = load(folder, ALONE), load(file, ALONE)
    assert one.keys() == other.keys()
    assert_equal_trees(one, other)
    parts = {part_of(folder, rank).name for rank in range(pool.world_size)}
    assert files_in(folder) == {"README.txt", "meta.pt", ".metadata", *parts}
    with pytest.raises(IsADirectoryError):  # nothing of this package runs there
        DDPStrategy().load_checkpoint(folder)
    assert "ddp, fails with IsADirectoryError" in (folder / "README.txt").read_text()
    assert "lightning-zero consolidate FOLDER one.ckpt" in (folder / "README.txt").read_text()
    assert files_in(tmp_path) == {"folder.ckpt", "file.ckpt"}


def assert_equal_trees(one: Any, other: Any) -> None:
    if isinstance(other, dict):
        assert one.keys() == other.keys()
        for key, value in other.items():
            assert_equal_trees(one[key], value)
    elif isinstance(other, list | tuple):
        assert len(one) == len(other)
        for ours, theirs in zip(one, other, strict=True):
            assert_equal_trees(ours, theirs)
    elif isinstance(other, Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    else:
        assert one == other


class Odd(nn.Module):
    """A tied, a frozen, an empty and a permuted parameter, a scalar, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 6)
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embedding.weight
        self.convolution = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.frozen = nn.Parameter(torch.arange(7.0), requires_grad=False)
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("counts", torch.arange(3))

    def forward(self, tokens: Tensor) -> Tensor:
        out = self.head(self.embedding(tokens)) * self.scale + self.frozen.sum()
        return out + self.convolution(torch.ones(1, 3, 4, 4)).mean() + self.empty.sum()


class OddLit(Resumable):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        torch.manual_seed(0)
        self.model = Odd()

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self.model(batch[:, :-1] % 13).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


@ranks(2)
@pytest.mark.parametrize(
    ("name", "precision"), [("zero3", "bf16-mixed"), pytest.param("zero2_offload", "64-true", marks=pytest.mark.slow)]
)
def test_parameters_of_every_kind(pool: RankPool, name: str, precision: str, tmp_path: Path) -> None:
    folder, file = tmp_path / "folder.ckpt", tmp_path / "file.ckpt"
    pool.run(save_at_end, sharded(name, persistence_numel=0), RECIPE, str(folder), OddLit, precision=precision)
    pool.run(save_at_end, name, RECIPE, str(file), OddLit, precision=precision)
    found = load(folder, ALONE)
    assert_equal_trees(found, load(file, ALONE) | {"lightning_zero": found["lightning_zero"]})
    weights = found["state_dict"]
    assert weights["model.head.weight"] is weights["model.embedding.weight"]
    # No value is written twice, and no padding.
    states = found["optimizer_states"][0]["state"].values()
    values = [*weights.values(), *(state[key] for state in states for key in ("exp_avg", "exp_avg_sq"))]
    nbytes = sum({id(value): value.numel() * value.element_size() for value in values}.values())
    archives = sum(path.stat().st_size for path in folder.glob("*.distcp"))
    assert nbytes < archives < nbytes + 2048 * len(load_metadata(folder).storage_data)


def load_metadata(folder: Path) -> Any:
    from torch.distributed.checkpoint import FileSystemReader

    return FileSystemReader(folder).read_metadata()


@pytest.mark.parametrize(
    ("reader", "ranks_now"),
    [
        ("zero2_offload", 1),
        pytest.param("zero3", 4, marks=pytest.mark.slow),
        pytest.param("zero0", 2, marks=pytest.mark.slow),
    ],
)
def test_any_world_resumes_from_it(
    request: pytest.FixtureRequest, pool2: RankPool, reader: str, ranks_now: int, tmp_path: Path
) -> None:
    """As from the file."""
    folder, file = str(tmp_path / "folder.ckpt"), str(tmp_path / "file.ckpt")
    for path, strategy in ((folder, sharded("zero3")), (file, "zero3")):
        pool2.run(save_at_end, strategy, RECIPE, path, Global, precision="64-true")
    readers: RankPool = request.getfixturevalue(f"pool{ranks_now}")
    one, other = (
        readers.run(run, reader, RECIPE, Global, steps=4, resume=path, precision="64-true")[0]
        for path in (folder, file)
    )
    assert_same(one.weights, other.weights)
    assert_equal_trees(one.optimizer_states, other.optimizer_states)


class Named(Resumable):
    """With hyperparameters, as `load_from_checkpoint` needs them."""

    def __init__(self, width: int, recipe: Recipe = RECIPE) -> None:
        super().__init__(recipe)
        self.save_hyperparameters("width")
        self.extra = nn.Linear(width, 2)


def save_named(strategy: Any, path: str) -> Fitted:
    return save_at_end(strategy, RECIPE, path, lambda _: Named(3))  # type: ignore[arg-type]


@ranks(2)
def test_load_from_checkpoint(pool: RankPool, tmp_path: Path) -> None:
    for name, strategy in (("folder.ckpt", sharded("zero3")), ("file.ckpt", "zero3")):
        (fitted, _) = pool.run(save_named, strategy, str(tmp_path / name))
        module = lightning_zero.load_from_checkpoint(Named, tmp_path / name)
        assert module.hparams.width == 3
        assert_equal_trees({k.removeprefix("model."): v for k, v in module.state_dict().items()}, fitted.weights)
        assert lightning_zero.load_from_checkpoint(Named, tmp_path / name, width=3).hparams.width == 3


@pytest.mark.parametrize("strategy", [sharded("zero3"), "zero3"], ids=["folder", "file"])
def test_load_from_checkpoint_to_a_device(pool1: RankPool, tmp_path: Path, strategy: Any) -> None:
    pool1.run(save_named, strategy, str(tmp_path / "a.ckpt"))
    for location, device in (
        (torch.device("meta"), "meta"),
        ({"cpu": "meta"}, "meta"),
        (lambda *_: torch.UntypedStorage(0, device="meta"), "meta"),
        ({"cuda": "meta"}, "cpu"),
        (lambda storage, _: None, "cpu"),
    ):
        module = lightning_zero.load_from_checkpoint(Named, tmp_path / "a.ckpt", map_location=location)
        assert {p.device.type for p in module.parameters()} == {device}
        assert module.hparams.width == 3


# ------------------------------------------------------------------------------------------- one process, any weights


class Tagged(Tensor):
    """A tensor that is more than its values."""


def make_weights() -> dict[str, Tensor]:
    wide = torch.randn(1000, 1000)
    weights = {str(dtype): torch.arange(2.0).to(dtype) for dtype in (torch.bfloat16, torch.bool, torch.complex64)}
    return weights | {
        "many tiles": torch.randn(TILE // 4 * 2 + 3),
        "part": wide[3:5, ::2],
        "tied": wide,
        "tied too": wide,
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "number": torch.tensor(5),
        "nothing": torch.zeros(0, 3),
        "parameter": nn.Parameter(torch.ones(3)),
        "float8": torch.ones(4).to(torch.float8_e4m3fn),
        "tagged": torch.randn(3).as_subclass(Tagged),
        "sparse": torch.eye(3).to_sparse(),
    }


def plain(value: Tensor) -> Tensor:
    return value.float() if value.dtype == torch.float8_e4m3fn else value.detach().to_dense().resolve_conj()


def save_alone(tree: Any, path: Path, checksums: bool) -> None:
    saving = begin("sharded", {"pytorch-lightning_version": "2", **tree}, path, None, ALONE, checksums)
    saving.write(ALONE)


@pytest.mark.parametrize("checksums", [True, False])
def test_any_weights_are_what_torch_reads(checksums: bool, tmp_path: Path) -> None:
    weights, folder = make_weights(), tmp_path / "a.ckpt"
    save_alone({"state_dict": weights, "epoch": 3}, folder, checksums)
    dcp_to_torch_save(folder, tmp_path / "one")
    consolidated = torch.load(tmp_path / "one", weights_only=False)["model"]
    for found in (load(folder, ALONE, weights_only=False)["state_dict"], consolidated):
        assert found.keys() == weights.keys()
        for key, value in weights.items():
            assert (found[key].dtype, found[key].layout) == (value.dtype, value.layout)
            assert isinstance(found[key], Tagged) == isinstance(value, Tagged)
            assert torch.equal(plain(found[key]), plain(value)), key
    assert part_of(folder, 0).stat().st_size < 21 << 20  # 20: no tied tensor twice, no whole one for a part


def contents_of(path: Path) -> object:
    return sorted(each.name for each in path.iterdir()) if path.is_dir() else path.read_bytes()


@pytest.mark.parametrize("container", ["full", "sharded"])
def test_all_is_on_the_disk_before_it_gets_its_name(
    container: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the loss of power leaves of what was not flushed: a folder is complete by the name of `meta.pt`."""
    path, synced, named = tmp_path / "a.ckpt", {}, []
    fsync = os.fsync

    def noting(file: int) -> None:
        fsync(file)
        synced[os.fstat(file).st_ino] = contents_of(Path(f"/proc/self/fd/{file}").resolve())

    def renamed_by(method: Callable[..., Path]) -> Callable[[Path, Path], Path]:
        def renamed(self: Path, target: Path) -> Path:
            if target.name in (META, path.name):
                draft = self.parent if target.name == META else self
                for each in (draft, *draft.glob("*")):
                    assert synced[each.stat().st_ino] == contents_of(each), f"{target.name} before {each}"
                named.append(target.name)
            return method(self, target)

        return renamed

    monkeypatch.setattr(os, "fsync", noting)
    for name in ("rename", "replace"):
        monkeypatch.setattr(Path, name, renamed_by(getattr(Path, name)))
    saving = begin(container, {"state_dict": {"w": torch.ones(5)}, "epoch": 3}, path, None, ALONE)
    saving.write(ALONE)
    assert named == ([META] if container == "sharded" else []) + [path.name]
    assert synced[tmp_path.stat().st_ino] == [path.name]


def test_a_default_device_changes_nothing(tmp_path: Path) -> None:
    weights = {"w": torch.arange(5.0)}
    with torch.device("meta"):
        save_alone({"state_dict": weights}, tmp_path / "a.ckpt", True)
    assert torch.equal(load(tmp_path / "a.ckpt", ALONE)["state_dict"]["w"], weights["w"])


def test_a_tensor_with_too_few_values_is_not_written() -> None:
    item = folder_container._Item.of(MetadataIndex("w"), torch.empty(5, device="meta"), [torch.ones(4)])
    with pytest.raises(ValueError, match="w has 16 bytes, not 20"):
        list(folder_container._write_items([item], io.BytesIO(), "file", checksums=False))


@pytest.mark.parametrize("checksums", [True, False])
def test_checksums_are_right_or_left_out(checksums: bool, tmp_path: Path) -> None:
    weights, folder = make_weights(), tmp_path / "a.ckpt"
    save_alone({"state_dict": weights}, folder, checksums)
    data = part_of(folder, 0).read_bytes()
    written = load_metadata(folder).storage_data
    assert {index.fqn for index in written} == {f"model.{key}" for key in weights}
    for index, info in written.items():
        with zipfile.ZipFile(io.BytesIO(data[info.offset :][: info.length])) as archive:
            values = [record for record in archive.infolist() if "/data/" in record.filename and record.file_size]
            by_torch = index.fqn in ("model.sparse", "model.tagged")
            assert all(bool(record.CRC) == (checksums or by_torch) for record in values)
            assert not checksums or archive.testzip() is None


# --------------------------------------------------------------------------------------------------------------- faults


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(folder, ALONE)
    return str(caught.value)


@pytest.fixture(scope="module")
def saved_folder(pool2: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "a.ckpt"
    pool2.run(save_at_end, sharded("zero3"), RECIPE, str(path))
    return path


@pytest.fixture
def folder(saved_folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved_folder, tmp_path / "a.ckpt")


def test_what_is_damaged_is_an_error_that_says_where(folder: Path) -> None:
    shard = part_of(folder, 1)
    whole = shard.read_bytes()
    info = max(
        ((i, s) for i, s in load_metadata(folder).storage_data.items() if s.relative_path == shard.name),
        key=lambda entry: entry[1].length,
    )
    flipped = bytearray(whole)
    flipped[info[1].offset + info[1].length // 2] ^= 1
    shard.write_bytes(flipped)
    assert f"a.ckpt is damaged: the checksum of {info[0].fqn}" in refusal(folder)
    load(folder, ALONE, checksums=False)
    shard.write_bytes(whole[:-1])
    assert f"{shard} is truncated: it has {len(whole) - 1} of {len(whole)} bytes" in refusal(folder)
    shard.unlink()
    assert f"1 of its files are missing: {shard.name}" in refusal(folder)
    shard.write_bytes(whole)
    metadata = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(metadata[:100])
    assert ".metadata is damaged" in refusal(folder)
    (folder / ".metadata").write_bytes(metadata)
    (folder / "meta.pt").unlink()
    assert "a.ckpt has no meta.pt, which is written last" in refusal(folder)


class Harmful:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


def test_its_metadata_runs_no_code(folder: Path) -> None:

    (folder / ".metadata").write_bytes(pickle.dumps(Harmful()))
    assert "it names posix.system, which is no part of DCP's format" in refusal(folder)


def save_over(strategy: Any, path: str) -> None:
    trainer = make_trainer(strategy)
    trainer.fit(Resumable(RECIPE))
    for _ in range(2):
        trainer.save_checkpoint(path)


@ranks(2)
def test_each_container_replaces_the_other(pool: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    for strategy in (sharded("zero2"), "zero2", sharded("zero2")):
        pool.run(save_over, strategy, str(path))
        assert load(path, ALONE)["global_step"] == RECIPE.steps
        assert files_in(tmp_path) == {"last.ckpt"}
        assert path.is_dir() == isinstance(strategy, dict)
        assert not (path / "lock").exists()


def save_without_exchange(strategy: Any, path: str, fatal: bool) -> None:
    """On a file system that cannot swap two names; or killed between two renames."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_zero.checkpoint.commit._exchange", lambda *_: False)
        trainer = make_trainer(strategy)
        trainer.fit(Resumable(RECIPE))
        if fatal and dist.get_rank() == 0:
            rename = Path.rename

            def renaming(self: Path, target: Path) -> Path:
                if target == Path(path):
                    os.kill(os.getpid(), signal.SIGKILL)
                return rename(self, target)

            patch.setattr(Path, "rename", renaming)
        trainer.save_checkpoint(path)


@pytest.mark.slow
@ranks(2)
def test_where_names_cannot_be_swapped(pool: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    for _ in range(2):
        pool.run(save_without_exchange, sharded("zero2"), str(path), False)
        assert files_in(tmp_path) == {"a.ckpt"}
    with pytest.raises(RankError):
        pool.run_within(30, save_without_exchange, sharded("zero2"), str(path), True)
    assert not path.exists()
    assert load(path, ALONE)["global_step"] == RECIPE.steps
    pool.run(save_without_exchange, sharded("zero2"), str(path), False)
    assert files_in(tmp_path) == {"a.ckpt"}


def resume_last_in(root: Path, callback: type[Checkpoint], options: dict[str, Any]) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        return resume_last(sharded("zero2"), RECIPE, callback, **options)


@pytest.mark.parametrize(
    ("callback", "options"),
    [
        (ModelCheckpoint, {"dirpath": "checkpoints", "save_top_k": 0}),
        (ModelCheckpoint, {"save_top_k": 0}),
        (OnExceptionCheckpoint, {"dirpath": "checkpoints", "filename": "last"}),
    ],
)
def test_the_last_checkpoint_is_found_where_its_save_was_killed(
    callback: type[Checkpoint], options: dict[str, Any], pool2: RankPool, tmp_path: Path
) -> None:
    """Between two renames, on a file system that cannot swap two names."""
    path = tmp_path / "checkpoints" / "last.ckpt"
    pool2.run(save_at_end, sharded("zero2"), RECIPE, str(path))
    draft = Draft(path, folder=True)
    for file in path.iterdir():
        file.rename(draft.temporary / file.name)
    path.rmdir()
    assert pool2.run(resume_last_in, tmp_path, callback, options) == [0, 0]  # its save is not killed yet
    os.close(draft.file)
    assert pool2.run(resume_last_in, tmp_path, callback, options) == [RECIPE.steps] * 2
    # The fit has ended without an exception.
    assert files_in(path.parent) == (set() if callback is OnExceptionCheckpoint else {"last.ckpt"})


def test_a_draft_that_lost_the_name_to_take_is_left_alone(tmp_path: Path) -> None:
    """As after a loss of power, where the file system wrote the name last."""
    draft = Draft(tmp_path / "last.ckpt", folder=True)
    for name in (META, METADATA):
        (draft.temporary / name).touch()
    (draft.temporary / "lock").write_bytes(b"")
    os.close(draft.file)
    recover_all(tmp_path)
    assert draft.temporary.is_dir()


def save_apart(strategy: Any, path: str) -> list[str]:
    """Every rank has a file system of its own, and a folder there."""
    trainer = make_trainer(strategy)
    trainer.fit(Resumable(RECIPE))
    own, warned = Path(path) / str(dist.get_rank()), []
    is_dir = Path.is_dir
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "is_dir", lambda self: is_dir(self) and (own in self.parents or self == own))
        patch.setattr("lightning_zero.integration.checkpointing.rank_zero_warn", warned.append)
        own.mkdir(exist_ok=True)
        patch.chdir(own)
        trainer.save_checkpoint("a.ckpt")  # all ranks save under the path that rank 0 gives
    return warned


def resume_apart(folder: str, shared: bool) -> int | str:
    """The step with which a fit goes on where only rank 0 finds a checkpoint, or the fit's error."""
    own, exists = Path(folder) / str(dist.get_rank()), Path.exists
    own.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        if not shared and dist.get_rank() > 0:
            patch.setattr(Path, "exists", lambda self, **options: self.name != "last.ckpt" and exists(self, **options))
        try:
            return resume_last_in(own, ModelCheckpoint, {"dirpath": "checkpoints", "save_top_k": 0})
        except CheckpointError as error:
            return str(error)


@ranks(2)
def test_ranks_resume_together_or_not_at_all(pool: RankPool, tmp_path: Path) -> None:
    """One rank finds the last checkpoint; the others have looked elsewhere."""
    path = tmp_path / "0" / "checkpoints" / "last.ckpt"
    pool.run(save_at_end, sharded("zero2"), RECIPE, str(path))
    assert pool.run_within(30, resume_apart, str(tmp_path), True) == [RECIPE.steps] * 2
    for message in pool.run_within(30, resume_apart, str(tmp_path), False):
        assert str(message).startswith(f"rank 0 has found the checkpoint {path}, but rank 1 cannot see it")


def load_own(folder: str, new: bool = False) -> str:
    """How a load fails where every rank has a file system of its own.

    New ones on one machine, as containers have them, may give their files the same numbers and times.
    """
    stat, rank = Path.stat, dist.get_rank()

    def as_on_new(path: Path, **options: Any) -> os.stat_result:
        mode, _, _, *others = stat(path, **options)
        return os.stat_result((mode, 1, rank, *others), {"st_ctime_ns": 1})

    with pytest.MonkeyPatch.context() as patch:
        if new:
            patch.setattr(Path, "stat", as_on_new)
        with pytest.raises(CheckpointError) as caught:
            load(Path(folder) / str(rank) / "a.ckpt", Mesh.create().world)
    return str(caught.value)


@ranks(2)
def test_ranks_need_no_shared_file_system(pool: RankPool, tmp_path: Path) -> None:
    messages = pool.run(save_apart, sharded("zero3"), str(tmp_path))
    assert "not all ranks share the file system of rank 0" in messages[0][0]
    homes = [tmp_path / str(rank) / "a.ckpt" for rank in range(pool.world_size)]
    for rank, home in enumerate(homes):
        assert files_in(home) == {"README.txt", ".metadata", "meta.pt", part_of(home, rank).name}
        assert (home / "meta.pt").read_bytes() == (homes[0] / "meta.pt").read_bytes()
    assert "copy the files of all these folders into each, or into one" in refusal(homes[0])
    part = part_of(homes[1], 1)
    part.rename(homes[0] / part.name)
    pool.run(save_at_end, "zero3", RECIPE, str(tmp_path / "file.ckpt"))
    assert_equal_trees(load(homes[0], ALONE), load(tmp_path / "file.ckpt", ALONE))
    shutil.rmtree(homes[1])
    for message in pool.run(load_own, str(tmp_path)):
        said = f"rank 1: CheckpointError: {homes[1]} is no checkpoint: a folder by torch.distributed.checkpoint has "
        assert said in message


@ranks(2)
def test_a_copy_from_an_earlier_save_does_not_pass_for_one(pool: RankPool, tmp_path: Path) -> None:
    """Where someone copies the files of the other node into each folder, and has done so before."""
    home, other = (tmp_path / str(rank) / "a.ckpt" for rank in range(2))
    pool.run(save_apart, sharded("zero2"), str(tmp_path))
    earlier = shutil.copy(part_of(other, 1), tmp_path)
    pool.run(save_apart, sharded("zero2"), str(tmp_path))
    shutil.copy(earlier, home)
    later = part_of(other, 1)
    assert f"1 of its files are missing: {later.name}" in refusal(home)
    shutil.copy(later, home)
    assert load(home, ALONE)["global_step"] == RECIPE.steps


@ranks(2)
@pytest.mark.parametrize("container", ["full", "sharded"])
def test_each_nodes_copy_is_verified(pool: RankPool, container: str, tmp_path: Path) -> None:
    """All of it, and it must be of the save that the others have."""
    weights = {name: torch.rand(1000) for name in "abcd"}
    homes, later = [tmp_path / str(rank) for rank in range(2)], tmp_path / "later" / "a.ckpt"
    begin(container, {"state_dict": weights}, homes[0] / "a.ckpt", (), ALONE).write(ALONE)
    begin(container, {"state_dict": {name: w + 1 for name, w in weights.items()}}, later, (), ALONE).write(ALONE)
    shutil.copytree(*homes)
    for rank, (name, values) in itertools.product(range(2), weights.items()):
        path = homes[rank] / "a.ckpt"
        file = part_of(path, 0) if path.is_dir() else path
        whole = file.read_bytes()
        place = whole.index(values.numpy().tobytes())
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        tensor = f"['state_dict']['{name}']" if container == "full" else f"state_dict.{name}"
        for message in (each for new in (False, True) for each in pool.run(load_own, str(tmp_path), new)):
            assert f"the checksum of {tensor} does not match in the copy that rank {rank} sees" in message
        file.write_bytes(whole)
    shutil.rmtree(homes[1])
    shutil.copytree(later.parent, homes[1])
    said = "the file of another save" if container == "full" else "folders of several saves"
    assert all(said in message for message in pool.run(load_own, str(tmp_path)))


@ranks(2)
def test_a_full_disk_is_an_error_on_all_ranks(pool: RankPool, tmp_path: Path) -> None:
    victim, limit = 1, 2000
    path = tmp_path / "a.ckpt"
    messages = pool.run_within(30, save_with_full_disk, sharded("zero3"), str(path), victim, limit)
    assert len(set(messages)) == 1
    assert f"rank {victim}: " in messages[0]
    assert str(path) in messages[0]
    assert load(path, ALONE)["global_step"] == RECIPE.steps
    assert files_in(tmp_path) == {"a.ckpt"}


def save_with_full_disk(strategy: Any, path: str, victim: int, limit: int) -> str:

    trainer = make_trainer(strategy)
    trainer.fit(Resumable(RECIPE))
    trainer.save_checkpoint(path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == victim:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        trainer.save_checkpoint(path)
    except CheckpointError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return "saved"


# ---------------------------------------------------------------------------------------------------------------- tools


def verb(*arguments: Any) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def test_consolidate(folder: Path, pool2: RankPool, tmp_path: Path) -> None:
    one, other = tmp_path / "one.ckpt", tmp_path / "file.ckpt"
    pool2.run(save_at_end, "zero3", RECIPE, str(other))
    result = verb("consolidate", folder, one)
    assert result.exit_code == 0, result.output
    assert "state of 1 optimizer" in result.output
    expected = torch.load(other, weights_only=True)
    assert_equal_trees(torch.load(one, weights_only=True), expected)
    assert verb("consolidate", folder, one).exit_code == 1
    assert verb("consolidate", folder, one, "--overwrite", "--dtype", "bf16").exit_code == 0
    expected["state_dict"] = {k: v.to(torch.bfloat16) for k, v in expected["state_dict"].items()}
    assert_equal_trees(torch.load(one, weights_only=True), expected)
    assert verb("consolidate", one, tmp_path / "two.ckpt").exit_code == 1
    assert files_in(tmp_path) == {"a.ckpt", "one.ckpt", "file.ckpt"}


@pytest.mark.parametrize(
    ("spoil", "source", "said"),
    [
        (lambda folder: None, "", "There are checkpoints in it: give the path of one, a.ckpt"),
        (lambda folder: None, "a.ckpt/meta.pt", "is a part of the checkpoint {folder}; give the path of this folder"),
        (lambda folder: (folder / ".metadata").unlink(), "a.ckpt", "copy .metadata as well, which a shell's * leaves"),
        (lambda folder: part_of(folder, 0).unlink(), "a.ckpt", "If each node has written a folder of its own, copy"),
        (lambda folder: (folder.parent / "text").write_text("text"), "text", "text is not a checkpoint: torch.save"),
        (lambda folder: make_files(folder.parent / "ds", "latest"), "ds", "convert-deepspeed {folder.parent}/ds OUT"),
        (lambda folder: make_files(folder.parent / ".1.incomplete", "lock"), ".1.incomplete", "was never completed"),
    ],
)
def test_consolidate_says_what_else_it_was_given(
    spoil: Callable[[Path], object], source: str, said: str, folder: Path, tmp_path: Path
) -> None:
    spoil(folder)
    for arguments in (("consolidate", tmp_path / source, tmp_path / "one.ckpt"), ("inspect", tmp_path / source)):
        result = verb(*arguments)
        assert result.exit_code == 1
        assert said.format(folder=folder) in result.output
    assert not (tmp_path / "one.ckpt").exists()


def make_files(folder: Path, *names: str) -> None:
    folder.mkdir()
    for name in names:
        (folder / name).touch()


def test_consolidate_finds_a_folder_whose_save_was_killed_between_two_renames(folder: Path, tmp_path: Path) -> None:
    draft = Draft(tmp_path / "last.ckpt", folder=True)
    for file in folder.iterdir():
        file.rename(draft.temporary / file.name)
    os.close(draft.file)  # as when its process dies
    assert verb("consolidate", tmp_path / "last.ckpt", tmp_path / "one.ckpt").exit_code == 0


def test_consolidate_keeps_ties(tmp_path: Path, pool2: RankPool) -> None:
    pool2.run(save_at_end, sharded("zero3"), RECIPE, str(tmp_path / "a.ckpt"), OddLit)
    verb("consolidate", tmp_path / "a.ckpt", tmp_path / "one.ckpt", "--dtype", "bf16")
    weights = torch.load(tmp_path / "one.ckpt", weights_only=True)["state_dict"]
    assert weights["model.head.weight"].data_ptr() == weights["model.embedding.weight"].data_ptr()


def test_inspect_and_export(folder: Path, pool2: RankPool, tmp_path: Path) -> None:
    pool2.run(save_at_end, "zero3", RECIPE, str(tmp_path / "file.ckpt"))
    shown, expected = (json.loads(verb("inspect", path, "--json").output) for path in (folder, tmp_path / "file.ckpt"))
    for key in ("tensors", "optimizers", "weights_bytes", "optimizer_bytes", "global_step", "keys"):
        ours, theirs = shown[key], expected[key]
        assert (sorted(ours) == sorted(theirs)) if key == "keys" else ours == theirs
    for path, out in ((folder, tmp_path / "out"), (tmp_path / "file.ckpt", tmp_path / "other")):
        result = verb("export", path, out, "--dtype", "bf16")
        assert result.exit_code == 0, result.output
    assert_equal_trees(*(load_file(tmp_path / out / "model.safetensors") for out in ("out", "other")))


@pytest.mark.parametrize("key", slow_unless(["model"], ["model", "state_dict"]))
def test_folders_that_others_write(key: str, pool1: RankPool, tmp_path: Path) -> None:
    """As Lightning's FSDP strategy does, by DCP itself; its ModelParallelStrategy calls the weights `state_dict`."""
    folder, file = tmp_path / "folder.ckpt", tmp_path / "file.ckpt"
    pool1.run(save_at_end, "ddp", RECIPE, str(file), precision="64-true")
    rest = torch.load(file, weights_only=True)
    states = {key: rest.pop("state_dict"), "optimizer_0": named(rest.pop("optimizer_states")[0])}
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(states, checkpoint_id=folder, no_dist=True)
    torch.save(rest, folder / "meta.pt")
    one, other = (
        pool1.run(run, "zero2", RECIPE, steps=4, resume=str(path), precision="64-true")[0] for path in (folder, file)
    )
    assert_same(one.weights, other.weights)
    assert_equal_trees(one.optimizer_states, other.optimizer_states)


def named(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state with names for its indices, as FSDP has it."""
    model = RECIPE.make_model()
    name_of = {id(parameter): f"model.{name}" for name, parameter in model.named_parameters()}
    names = [name_of[id(p)] for group in RECIPE.make_optimizer(model).param_groups for p in group["params"]]
    return {
        "state": {names[index]: values for index, values in state["state"].items()},
        "param_groups": [{**group, "params": [names[i] for i in group["params"]]} for group in state["param_groups"]],
    }


# ----------------------------------------------------------------------------------------------------- temporary names


def draft_over_older(path: Path) -> tuple[Draft, Path]:
    """A complete draft, and the older checkpoint beside its name: the save is between two renames."""
    draft, aside = Draft(path, folder=True), commit._temporary_name(path)
    aside.mkdir()
    for folder, age in (draft.temporary, 0), (aside, 9):
        for name in (METADATA, META):
            (folder / name).write_text(f"of age {age}")
        os.utime(folder / META, (1e9 - age, 1e9 - age))
    return draft, aside


def test_a_draft_that_cannot_be_made_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        Draft(tmp_path / "a.ckpt", folder=True)
    assert not files_in(tmp_path)


def test_a_draft_that_is_written_is_nobodys_to_take(tmp_path: Path) -> None:
    """It is complete, and locked: a load or a save beside it leaves it alone."""
    path = tmp_path / "a.ckpt"
    draft, _ = draft_over_older(path)
    recover(path)
    assert not path.exists()  # or the save could not take the name
    remove_leftovers(tmp_path)
    assert not path.exists()
    draft.complete()
    draft.close()
    assert files_in(path) == {".metadata", "meta.pt"}
    assert (path / META).read_text() == "of age 0"
    assert files_in(tmp_path) == {"a.ckpt"}


@pytest.mark.parametrize("order", ["lists, then renames", "renames, then lists", "one", "no locks"])
def test_the_newest_complete_draft_gets_its_name(order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another rank is first between this one's look at the name and its renaming."""
    path, drafts = tmp_path / "a.ckpt", commit._drafts
    draft, _ = draft_over_older(path)
    os.close(draft.file)  # as when its process dies

    def listed(folder: Path) -> list[Path]:
        monkeypatch.undo()
        before = drafts(folder)
        recover(path)  # by the other rank
        return before if order == "lists, then renames" else drafts(folder)

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    if order == "no locks":
        monkeypatch.setattr(commit.fcntl, "flock", refuse)
    elif order != "one":
        monkeypatch.setattr(commit, "_drafts", listed)
    recover(path)
    assert (path / META).read_text() == "of age 0"
    assert not (path / "lock").exists()


@pytest.mark.parametrize("moment", ["before it is renamed", "between its two renames"])
def test_a_save_ends_well_if_a_reader_recovers_its_draft_where_there_are_no_locks(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, rename = tmp_path / "a.ckpt", Path.rename
    draft, aside = draft_over_older(path)

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    def renamed(source: Path, target: Path) -> Path:
        moved = rename(source, target)
        if source == path:
            monkeypatch.setattr(Path, "rename", rename)
            recover(path)
        return moved

    monkeypatch.setattr(commit.fcntl, "flock", refuse)
    if moment == "before it is renamed":
        recover(path)
    else:
        aside.rename(path)
        monkeypatch.setattr(commit, "_exchange", lambda *_: False)
        monkeypatch.setattr(Path, "rename", renamed)
    draft.complete()
    draft.close()
    assert (path / META).read_text() == "of age 0"


def test_what_is_being_removed_is_not_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.ckpt"
    draft, aside = draft_over_older(path)
    shutil.rmtree(aside)
    draft.complete()
    draft.close()
    monkeypatch.setattr(commit, "_remove", lambda _: None)  # as when its process dies
    remove(path)
    monkeypatch.undo()
    recover(path)
    assert not path.exists()
    remove_leftovers(tmp_path)
    assert not files_in(tmp_path)


def test_a_complete_leftover_gets_its_name(tmp_path: Path) -> None:
    """From the next save beside it, or from a load of that name."""
    path = tmp_path / ("ä" * 120 + ".ckpt")
    for find in (lambda: remove_leftovers(tmp_path), lambda: refusal(path)):
        draft = Draft(path, folder=True)
        for name in (".metadata", "meta.pt"):
            (draft.temporary / name).write_bytes(b"")
        os.close(draft.file)  # as when its process dies
        find()
        assert files_in(tmp_path) == {path.name}
        shutil.rmtree(path)


def test_temporary_names_are_no_names_of_checkpoints(tmp_path: Path) -> None:
    """Lightning looks for numbers in all names with `ckpt_` in them, to find where a SLURM job goes on."""
    draft = Draft(tmp_path / "hpc_ckpt_2.ckpt", folder=True)
    assert "ckpt" not in draft.temporary.name
    draft.close()


def test_a_save_into_a_checkpoint_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"a\.ckpt is a checkpoint; save beside it"):
        Draft(folder / "b.ckpt")


# ----------------------------------------------------------------------------------------------------------- user code


class Teacher(Resumable):
    """Keeps weights of the checkpoint that it resumes from, and saves them again."""

    teacher: dict[str, Any] | None = None

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.teacher = dict(checkpoint["state_dict"])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["teacher"] = dict(self.teacher or checkpoint["state_dict"])


def save_often(strategy: Any, path: str, resume: str) -> None:
    trainer = make_trainer(strategy, max_epochs=-1, max_steps=4)
    trainer.fit(Teacher(RECIPE), ckpt_path=resume)
    for _ in range(3):
        trainer.save_checkpoint(path)


@ranks(2)
def test_what_user_code_keeps_of_a_replaced_checkpoint(pool: RankPool, tmp_path: Path) -> None:
    path, first = tmp_path / "last.ckpt", tmp_path / "first.ckpt"
    for strategy, target in ((sharded("zero3"), path), ("zero3", first)):
        pool.run(save_at_end, strategy, RECIPE, str(target))
    pool.run(save_often, sharded("zero3"), str(path), str(path))
    found = load(path, ALONE)
    assert_equal_trees(found["teacher"], load(first, ALONE)["state_dict"])
    name = "model.head.weight"
    assert not torch.equal(found["teacher"][name], found["state_dict"][name])


@pytest.mark.parametrize("container", ["full", "sharded"])
def test_files_that_were_not_read_before_are_read_after_a_save_over_them(container: str, folder: Path) -> None:
    expected = {name: value.clone() for name, value in load(folder, ALONE)["state_dict"].items()}
    kept = load(folder, ALONE, checksums=False)["state_dict"]  # which would read them
    save = begin(container, {"state_dict": {"w": torch.ones(3)}}, folder, (), ALONE)
    save.write(ALONE)
    assert_equal_trees(kept, expected)


@pytest.mark.parametrize("container", ["full", "sharded"])
def test_two_loads_of_a_path_are_two_checkpoints(container: str, tmp_path: Path) -> None:
    """If another one has replaced the first in between: their tensors have the same numbers."""

    def write(form: str, path: Path, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        save = begin(form, {"state_dict": weights}, path, (), ALONE)
        save.write(ALONE)
        return load(path, ALONE)["state_dict"]

    values = torch.zeros(9), torch.ones(9)
    first, second = (write("sharded", tmp_path / "a.ckpt", {"w": value})["w"] for value in values)
    both = {"first": first, "second": second, "tied": second}
    found = write(container, tmp_path / "both.ckpt", both)
    assert_equal_trees(found, {"first": values[0], "second": values[1], "tied": values[1]})


class Renames(Resumable):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["model"] = {k.removeprefix("model."): v for k, v in checkpoint["state_dict"].items()}


@ranks(2)
def test_an_entry_with_the_name_of_the_weights_is_refused(pool: RankPool, tmp_path: Path) -> None:
    messages = pool.run(save_after_fit, sharded("zero3"), RECIPE, Renames, str(tmp_path / "a.ckpt"))
    assert all("entry 'model' has a name that a folder needs" in message for message in messages)
    assert not files_in(tmp_path)


class Unpicklable(Resumable):
    """Its extra state cannot be saved."""

    def get_extra_state(self) -> Callable[[], None]:
        return lambda: None


@ranks(2)
@pytest.mark.parametrize("io", [[], [Derived()]], ids=["a folder", "a writer of the user's"])
def test_what_cannot_be_pickled_is_an_error_on_all_ranks(
    pool: RankPool, io: list[TorchCheckpointIO], tmp_path: Path
) -> None:
    messages = pool.run(save_after_fit, sharded("zero3"), RECIPE, Unpicklable, str(tmp_path / "a.ckpt"), plugins=io)
    assert all("rank 0: AttributeError: Can't pickle" in message for message in messages)
    assert not files_in(tmp_path)


class Sparse(Resumable):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.register_buffer("rows", torch.eye(3).to_sparse())


@ranks(2)
@pytest.mark.parametrize("container", ["full", "sharded"])
def test_a_sparse_buffer(pool: RankPool, container: str, tmp_path: Path) -> None:
    path = str(tmp_path / "a.ckpt")
    strategy = {**STRATEGIES["zero2"], "checkpoint_format": container}
    pool.run(save_at_end, strategy, RECIPE, path, Sparse)
    pool.run(run, strategy, RECIPE, Sparse, steps=4, resume=path)
    assert torch.equal(load(Path(path), ALONE)["state_dict"]["rows"].to_dense(), torch.eye(3))


class Placed(Resumable):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.save_hyperparameters({"home": Path("somewhere")})


def test_consolidate_says_what_it_cannot_read(pool1: RankPool, tmp_path: Path) -> None:
    pool1.run(save_at_end, sharded("zero2"), RECIPE, str(tmp_path / "a.ckpt"), Placed)
    result = verb("consolidate", tmp_path / "a.ckpt", tmp_path / "b.ckpt")
    assert result.exit_code == 1
    assert f"{tmp_path}/a.ckpt/meta.pt holds objects that cannot be read safely" in result.output
