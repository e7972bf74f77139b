"""What is read from a checkpoint file, and from files that are none."""

from __future__ import annotations

import pickle
import shutil
import subprocess
import sys
import zipfile
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint.resuming import save_at_end
from helpers import models
from helpers.ranks import RankPool, ranks
from strategy.fits import DDP, Lit, Recipe

from lightning_zero import DynamicLossScaler, ZeroPrecision
from lightning_zero.checkpoint import CheckpointError, begin
from lightning_zero.sharding import Group
from lightning_zero.tools.consolidate import consolidate
from lightning_zero.tools.contents import ParameterGroup, StateInfo, describe, plain, read_checkpoint

RECIPE = Recipe(optimizer="adamw", options={"lr": 0.05})
STATE = {"state": {"w": {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 0.1, "params": ["w"]}]}


def write(path: Path, state: dict[str, Any], **more: Any) -> Path:
    torch.save({"state_dict": state} | more, path)
    return path


def fp16(recipe: Recipe, path: str) -> None:
    precision = ZeroPrecision("16-mixed", scaler=DynamicLossScaler(init_scale=1024.0))
    save_at_end("zero3", recipe, path, plugins=[precision])


@ranks(2)
@pytest.mark.parametrize("name", ["zero3", DDP])
def test_a_checkpoint_is_described(pool: RankPool, name: str, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    pool.run(save_at_end, name, RECIPE, str(path))
    contents = describe(path)
    lit = Lit(RECIPE)
    assert {t.name: (t.shape, t.dtype) for t in contents.tensors} == {
        key: (tuple(value.shape), "float32") for key, value in lit.state_dict().items()
    }
    assert {t.name: t.same_as for t in contents.tensors if t.same_as} == {"model.head.weight": "model.tokens.weight"}
    elements = sum(parameter.numel() for parameter in lit.parameters())
    assert contents.weights_bytes == 4 * elements
    (optimizer,) = contents.optimizers
    moments = [StateInfo(key, len(list(lit.parameters())), ["float32"], 4 * elements) for key in MOMENTS]
    assert [entry for entry in optimizer.state if entry.name in MOMENTS] == moments
    assert contents.optimizer_bytes == sum(entry.bytes for entry in optimizer.state) > 8 * elements
    groups = RECIPE.make_optimizer(lit.model).param_groups
    assert [len(group.parameters) for group in optimizer.groups] == [len(group["params"]) for group in groups]
    assert [group.hyperparameters["weight_decay"] for group in optimizer.groups] == [0.1, 0.0]
    assert optimizer.groups[0].hyperparameters["betas"] == [0.9, 0.95]
    assert (contents.global_step, contents.epoch) == (3, 1)
    assert contents.lightning_version is not None
    assert contents.file_bytes == path.stat().st_size
    assert contents.loss_scale is None
    assert contents.opaque == []
    assert {"state_dict", "optimizer_states", "loops"} <= set(contents.keys)


MOMENTS = ("exp_avg", "exp_avg_sq")


@ranks(2)
def test_the_loss_scale_is_found(pool: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    pool.run(fp16, RECIPE, str(path))
    contents = describe(path)
    assert contents.loss_scale == 1024.0
    assert contents.skipped_steps == 0


def test_the_scale_of_lightnings_own_mixed_precision_is_found(tmp_path: Path) -> None:
    scaler = {"scale": 32.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 5}
    path = write(tmp_path / "a.ckpt", {"w": torch.ones(2)}, MixedPrecision=scaler)
    assert describe(path).loss_scale == 32.0


def test_the_world_that_wrote_it_is_found(tmp_path: Path) -> None:
    world = {"version": "0.1.0", "world_size": 4, "shard_size": 2, "stage": 3}
    assert describe(write(tmp_path / "a.ckpt", {"w": torch.ones(2)}, lightning_zero=world)).written_by == world
    assert describe(write(tmp_path / "b.ckpt", {"w": torch.ones(2)})).written_by is None


@pytest.mark.parametrize(
    ("name", "value", "number"),
    [("optimizer_states", STATE, 1), ("optimizer", STATE, 1), ("optimizers", [STATE, STATE], 2), ("lr", [0.1], 0)],
)
def test_optimizers_of_fabric_are_found_and_its_loss_scale(name: str, value: Any, number: int, tmp_path: Path) -> None:
    written_by = {"version": "0.1.0", "world_size": 1, "loss_scaler": {"scale": 8.0}}
    saved = {"model": {"w": torch.ones(2)}, name: value, "lightning_zero": written_by}
    torch.save(saved, tmp_path / "a.ckpt")
    contents = describe(tmp_path / "a.ckpt")
    assert [optimizer.groups for optimizer in contents.optimizers] == [[ParameterGroup(["w"], {"lr": 0.1})]] * number
    assert contents.loss_scale == 8.0
    save = begin("sharded", saved, tmp_path / "folder", (), Group())
    save.write(Group())
    assert consolidate(tmp_path / "folder", tmp_path / "one.ckpt").optimizers == number
    assert describe(tmp_path / "folder").optimizers == contents.optimizers


def test_state_of_every_kind_is_described(tmp_path: Path) -> None:
    named = {"lr": 0.2, "params": [2], "param_names": ["w"]}  # torch.optim.SGD(module.named_parameters())
    history = {"lr": 0.1, "betas": (0.9, torch.tensor(0.5)), "foreach": None, "params": [0, 1]}
    saved = {
        "param_groups": [history, named],
        "state": {0: {"step": 3, "past": [torch.ones(2), torch.ones(3)]}, 1: {"step": torch.tensor(3.0)}},
    }
    path = write(
        tmp_path / "a.ckpt",
        {"w": torch.ones(2), "s": torch.tensor(1), "e": torch.ones(0, 3), "x._extra_state": {"any": "thing"}},
        optimizer_states=[saved],
        callbacks={"ModelCheckpoint": {}},
    )
    contents = describe(path)
    assert contents.optimizers[0].groups == [
        ParameterGroup([0, 1], {"lr": 0.1, "betas": [0.9, 0.5], "foreach": None}),
        ParameterGroup(["w"], {"lr": 0.2}),
    ]
    assert contents.optimizers[0].state == [
        StateInfo("step", 2, ["float32", "number"], 4),
        StateInfo("past", 1, ["float32"], 20),
    ]
    assert [(t.name, t.shape, t.dtype, t.bytes) for t in contents.tensors] == [
        ("w", (2,), "float32", 8),
        ("s", (), "int64", 8),
        ("e", (0, 3), "float32", 0),
    ]
    assert contents.other_entries == ["x._extra_state"]
    assert contents.callbacks == ["ModelCheckpoint"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (float("inf"), "inf"),
        (float("nan"), "nan"),
        (torch.tensor([2]), 2),
        (torch.ones(2, 2), "<tensor of shape (2, 2)>"),
        ({1: (True, torch.float32)}, {"1": [True, "torch.float32"]}),
    ],
)
def test_hyperparameters_become_json(value: Any, expected: Any) -> None:
    assert plain(value) == expected


class Copier:
    """Copies a file where its pickle is run."""

    def __init__(self, source: Path, target: Path) -> None:
        self.paths = str(source), str(target)

    def __reduce__(self) -> Any:
        return shutil.copyfile, self.paths


def test_no_pickled_code_runs_and_the_rest_is_read(tmp_path: Path) -> None:
    """Hyperparameters of classes that `weights_only` refuses are common, and hide no weights."""
    path, copy = tmp_path / "a.ckpt", tmp_path / "copy"
    write(path, {"w": torch.ones(2)}, hyper_parameters={"args": Namespace(a=1), "evil": Copier(path, copy), "lr": 0.1})
    with pytest.raises(pickle.UnpicklingError):
        torch.load(path, weights_only=True)
    checkpoint, opaque = read_checkpoint(path)
    assert opaque == ["argparse.Namespace", "shutil.copyfile"]
    assert repr(checkpoint["hyper_parameters"]["args"]) == "<argparse.Namespace>"
    assert checkpoint["hyper_parameters"]["lr"] == 0.1
    assert torch.equal(checkpoint["state_dict"]["w"], torch.ones(2))
    assert describe(path).opaque == opaque
    assert not copy.exists()
    with pytest.raises(pickle.UnpicklingError):  # nothing stays allowed
        torch.load(path, weights_only=True)
    torch.load(path, weights_only=False)
    assert copy.exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_objects_in_a_folder_are_named(tmp_path: Path) -> None:
    path, copy = tmp_path / "a.ckpt", tmp_path / "copy"
    extra = {"args": Namespace(a=1), "evil": Copier(path / "meta.pt", copy), "lr": 0.1}
    dcp.save({"model": {"w": torch.ones(2), "x._extra_state": extra}}, checkpoint_id=path, no_dist=True)
    torch.save({"epoch": 1, "hyper_parameters": {"device": Namespace()}}, path / "meta.pt")
    checkpoint, opaque = read_checkpoint(path)
    assert opaque == ["argparse.Namespace", "shutil.copyfile"]
    assert torch.equal(checkpoint["state_dict"]["w"].clone(), torch.ones(2))
    assert repr(checkpoint["state_dict"]["x._extra_state"]["args"]) == "<argparse.Namespace>"
    assert checkpoint["state_dict"]["x._extra_state"]["lr"] == 0.1
    assert describe(path).opaque == opaque
    assert not copy.exists()


class Settings(OrderedDict[str, int]):
    """The safe reader fills no mapping but the common ones."""


def test_what_cannot_be_read_safely_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ckpt", {"w": torch.ones(2)}, hyper_parameters={"config": Settings(a=1)})
    with pytest.raises(CheckpointError, match=r"cannot be read safely: Can only SETITEM.*weights_only=False"):
        read_checkpoint(path)


def test_files_that_are_no_checkpoints_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"

    def refuses(match: str) -> None:
        with pytest.raises(CheckpointError, match=match):
            describe(path)

    for content in (b"", b"PK", b"some text", pickle.dumps({"state_dict": {}})):
        path.write_bytes(content)
        refuses("is not a checkpoint: torch.save writes zip archives")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/readme.txt", "text")
    refuses("cannot be read as a checkpoint")
    torch.save(torch.ones(3), path)
    refuses("no 'state_dict', but Tensor")
    torch.save({"w": torch.ones(3)}, path)
    refuses("no 'state_dict', but w. Bare weights can be wrapped")
    torch.save({"state_dict": {"w": torch.ones(2)}, "optimizer_states": [{"param_groups": 3}]}, path)
    refuses("'optimizer_states' is not in torch's format")
    torch.save({"state_dict": {}}, path, _use_new_zipfile_serialization=False)
    refuses("before 1.6")
    path.unlink()
    path.mkdir()
    refuses(r"is no checkpoint: a folder by torch\.distributed\.checkpoint has \.metadata\. Give the path of one$")
    with pytest.raises(FileNotFoundError):
        describe(tmp_path / "none.ckpt")


def test_a_file_cut_short_anywhere_is_refused(tmp_path: Path) -> None:
    model = models.make_model("transformer")
    whole = write(tmp_path / "a.ckpt", model.state_dict()).read_bytes()
    path = tmp_path / "cut.ckpt"
    for kept in (*range(4, 400, 36), *range(400, len(whole), len(whole) // 40), len(whole) - 1):
        path.write_bytes(whole[:kept])
        with pytest.raises(CheckpointError, match="is damaged: the end of the archive is missing"):
            describe(path)


def test_a_damaged_description_is_refused_or_read(tmp_path: Path) -> None:
    """Whatever a flipped byte of the pickle makes torch raise; torch checks no checksums."""
    path = write(tmp_path / "a.ckpt", {"weight": torch.ones(2), "bias": torch.zeros(2)}, global_step=3)
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        pickled = archive.read("a/data.pkl")
    begin, refused = whole.index(pickled), 0
    for place in range(begin, begin + len(pickled), 3):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:
            describe(path)
        except CheckpointError:
            refused += 1
    assert refused > len(pickled) / 3 / 2


def resident() -> int:
    """Bytes of memory, pages of mapped files included."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "RssFile")))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_tensor_is_read(tmp_path: Path) -> None:
    describe(write(tmp_path / "small.ckpt", {"w": torch.zeros(2)}))  # what reading takes once
    path = write(tmp_path / "a.ckpt", {f"w{number}": torch.zeros(1 << 20) for number in range(16)})
    before = resident()
    assert describe(path).weights_bytes == 64 << 20
    assert resident() - before < 4 << 20


LIMITED = """
import resource, sys
from pathlib import Path
from lightning_zero.tools.contents import describe
from lightning_zero.checkpoint.errors import CheckpointError
pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + (64 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    describe(Path(sys.argv[1]))
except CheckpointError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_file_that_the_system_does_not_map_is_no_damaged_one(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ckpt", {"w": torch.zeros(20 << 20)})
    command = [sys.executable, "-P", "-c", LIMITED, str(path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert result.stdout.startswith(f"The system refuses to map {path} into memory."), result.stderr
