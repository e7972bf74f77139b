"""DeepSpeed's folders become checkpoints with the same values, from which a run goes on."""

from __future__ import annotations

import enum
import os
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pytest
import torch
from checkpoint import train_deepspeed
from checkpoint.resuming import Resumable, run
from checkpoint.train_deepspeed import CASES, RECIPE, SAVED, STEPS, Buffered
from helpers.deepspeed_folder import Folder, classes, write_folder
from helpers.ranks import RankPool, ranks
from strategy.fits import Fitted, assert_same, assert_same_states
from torch import Tensor

from lightning_zero import DynamicLossScaler
from lightning_zero.checkpoint import CheckpointError
from lightning_zero.schedulers import WarmupLR
from lightning_zero.tools import deepspeed_runs as runs
from lightning_zero.tools.contents import describe
from lightning_zero.tools.deepspeed import convert
from lightning_zero.tools.deepspeed_runs import SlicedSource

BUFFERS = {"scale", "count"}
FROZEN = {name for name, parameter in Buffered(RECIPE).named_parameters() if not parameter.requires_grad}


class Resuming(Buffered, Resumable):
    """With a loader that goes on where it was."""


def load(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(path, weights_only=True)
    return loaded


@pytest.fixture(scope="module")
def whole(rank_pools: Callable[[int], RankPool], tmp_path_factory: pytest.TempPathFactory) -> tuple[Fitted, Path]:
    """A run, and the checkpoint that it wrote in between."""
    path = tmp_path_factory.mktemp("whole") / "a.ckpt"
    return rank_pools(2).run(run, "zero2", RECIPE, Resuming, steps=STEPS, save=(SAVED, str(path)))[0], path


@pytest.fixture
def original(whole: tuple[Fitted, Path]) -> dict[str, Any]:
    return load(whole[1])


def write(path: Path, checkpoint: dict[str, Any], layout: Folder) -> Path:
    write_folder(path, checkpoint, FROZEN, BUFFERS, layout)
    return path


def assert_same_values(converted: dict[str, Any], original: dict[str, Any]) -> None:
    assert list(converted["state_dict"]) == list(original["state_dict"])
    assert_same(converted["state_dict"], original["state_dict"])
    (new,), (old,) = converted["optimizer_states"], original["optimizer_states"]
    assert_same_states(new["state"], old["state"])
    for ours, theirs in zip(new["param_groups"], old["param_groups"], strict=True):
        assert ours["params"] == [name for name in theirs["params"] if name in old["state"]]
        assert ours | {"params": ()} == theirs | {"params": ()}


LAYOUTS = {
    "stage 1": Folder(1, ranks=3),
    "stage 2 with round robin and alignment": Folder(2, ranks=4, round_robin=True, alignment=8),
    "stage 3 with sub-groups": Folder(3, ranks=3, sub_group=50),
    "stage 1 on one rank": Folder(1, ranks=1),
    "stage 3 with less than an element for each rank": Folder(3, ranks=16),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_every_layout_becomes_the_checkpoint_that_it_was_made_of(
    original: dict[str, Any], layout: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SlicedSource, "fetch", pytest.fail)  # no tensor is put together in memory
    folder = write(tmp_path / "last.ckpt", original, layout)
    convert(folder, tmp_path / "out" / "a.ckpt", trust=True)
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["a.ckpt"]
    converted = load(tmp_path / "out" / "a.ckpt")
    assert_same_values(converted, original)
    state = converted["state_dict"]
    assert state["model.head.weight"].data_ptr() == state["model.tokens.weight"].data_ptr()
    steps = {entry["step"].data_ptr() for entry in converted["optimizer_states"][0]["state"].values()}
    assert len(steps) == len(converted["optimizer_states"][0]["state"])  # torch counts in place
    own = ("optimizer_states", "state_dict", "lightning_zero", "lightning_zero_rng")
    assert {k: v for k, v in converted.items() if k not in own} == {k: v for k, v in original.items() if k not in own}
    written_by = describe(tmp_path / "out" / "a.ckpt").written_by
    assert written_by is not None
    assert (written_by["stage"], written_by["world_size"]) == (layout.stage, layout.ranks)


def test_what_was_16_bit_becomes_fp32(original: dict[str, Any], tmp_path: Path) -> None:
    rounded = {
        name: value.bfloat16().float() if name in FROZEN else value for name, value in original["state_dict"].items()
    }
    for stage in (1, 2, 3):
        folder = write(tmp_path / f"{stage}", original, Folder(stage, half=torch.bfloat16))
        convert(folder, tmp_path / f"{stage}.ckpt", trust=True)
        assert_same_values(load(tmp_path / f"{stage}.ckpt"), original | {"state_dict": rounded})


@ranks(2)
@pytest.mark.parametrize(("stage", "name"), [(3, "zero2"), pytest.param(2, "zero3", marks=pytest.mark.slow)])
def test_a_run_goes_on(
    pool: RankPool, whole: tuple[Fitted, Path], original: dict[str, Any], stage: int, name: str, tmp_path: Path
) -> None:
    folder = write(tmp_path / "a", original, Folder(stage, ranks=3))
    convert(folder, tmp_path / "a.ckpt", trust=True)
    other = replace(RECIPE, seed=7)
    resumed = pool.run(run, name, other, Resuming, steps=STEPS, resume=str(tmp_path / "a.ckpt"))[0]
    assert_same(resumed.weights, whole[0].weights)
    assert_same_states(resumed.optimizer_states[0], whole[0].optimizer_states[0])
    assert (resumed.steps, resumed.epochs) == (whole[0].steps, whole[0].epochs)


def test_a_torch_optimizer_loads_the_state(original: dict[str, Any], tmp_path: Path) -> None:
    folder = write(tmp_path / "a", original, Folder(2, ranks=3, round_robin=True))
    convert(folder, tmp_path / "a.ckpt", trust=True)
    module = Buffered(RECIPE)
    trainable = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in trainable if p.dim() >= 2]}, {"params": [p for p in trainable if p.dim() < 2]}]
    )
    optimizer.load_state_dict(load(tmp_path / "a.ckpt")["optimizer_states"][0])
    names = {parameter: name for name, parameter in module.named_parameters()}
    found = {names[parameter]: dict(entry) for parameter, entry in optimizer.state.items()}
    assert_same_states(found, original["optimizer_states"][0]["state"])


# ---------------------------------------------------------------------------------------------------------- the scaler


def deepspeeds_scales(state: dict[str, Any], steps: int) -> list[float]:
    """The scale after each of so many steps without overflow, by DeepSpeed's rule."""
    scale, scales = state["cur_scale"], []
    for iteration in range(state["cur_iter"], state["cur_iter"] + steps):
        stable = iteration - state["last_overflow_iter"] - 1
        if stable > 0 and stable % state["scale_window"] == 0:
            scale *= 2
        scales.append(scale)
    return scales


def test_the_loss_scale_grows_when_deepspeeds_does(original: dict[str, Any], tmp_path: Path) -> None:
    for since in (1, 2, 3, 4, 5, 9):  # right after an overflow DeepSpeed waits one step longer
        state = {"cur_scale": 8.0, "cur_iter": 20, "last_overflow_iter": 19 - since, "scale_window": 3, "dynamic": True}
        state |= {"delayed_shift": 3, "cur_hysteresis": 2}
        layout = Folder(2, ranks=1, scaler=state, more={"skipped_steps": 4})
        convert(write(tmp_path / f"{since}", original, layout), tmp_path / f"{since}.ckpt", trust=True)
        saved = load(tmp_path / f"{since}.ckpt")["ZeroPrecision"]
        assert saved["skipped_steps"] == 4, since
        assert saved["scaler"]["overflows"] == 1, since
        scaler, scales = DynamicLossScaler(window=3), []
        scaler.load_state_dict(saved["scaler"])
        for _ in range(10):
            scaler.update(False)
            scales.append(scaler.scale)
        assert scales == deepspeeds_scales(state, 10), since


# --------------------------------------------------------------------------------------------------------- entries


class Color(enum.Enum):
    red = "red"


def test_entries_become_plain_values_and_the_rest_is_named(original: dict[str, Any], tmp_path: Path) -> None:
    entries = {
        "hyper_parameters": {"path": Path("a/b"), "lr": np.float64(0.5), "color": Color.red, "other": Namespace(a=1)},
        "by_key": {Path("a/b"): 1, Color.red: {Color.red: 2}, UUID(int=7): 3, 5: 4},
        "mine": [(1, {2}), torch.arange(10)[3:5]],
    }
    folder = write(tmp_path / "a", original, Folder(3, more=entries))
    converted = convert(folder, tmp_path / "a.ckpt", trust=True)
    assert converted.left_out == {"hyper_parameters.other": "argparse.Namespace", f"by_key.{UUID(int=7)}": "uuid.UUID"}
    loaded = load(tmp_path / "a.ckpt")
    assert loaded["hyper_parameters"] == {"path": "a/b", "lr": 0.5, "color": "red"}
    assert loaded["by_key"] == {"a/b": 1, "red": {"red": 2}, 5: 4}
    assert loaded["mine"][0] == (1, {2})
    assert loaded["mine"][1].tolist() == [3, 4]
    assert loaded["mine"][1].untyped_storage().nbytes() == 16


def test_a_folder_without_lightnings_entries(original: dict[str, Any], tmp_path: Path) -> None:
    bare = {key: original[key] for key in ("state_dict", "optimizer_states")}
    folder = write(tmp_path / "a", bare, Folder(3, more={"lr_scheduler": {"last_epoch": 3, "base_lrs": [0.1]}}))
    assert not convert(folder / "checkpoint", tmp_path / "a.ckpt", trust=True).lightning
    loaded = load(tmp_path / "a.ckpt")
    assert (loaded["global_step"], loaded["epoch"]) == (3, 0)
    assert loaded["lr_schedulers"] == [{"last_epoch": 3, "base_lrs": [0.1]}]


@pytest.mark.parametrize("lightning", [False, True])
def test_a_schedule_of_deepspeed_goes_on(original: dict[str, Any], tmp_path: Path, lightning: bool) -> None:
    """Its scheduler, which Lightning's strategy hands to the Trainer, counts from -1 on."""
    state: Any = {"last_batch_iteration": 2}
    bare = {key: original[key] for key in ("state_dict", "optimizer_states")}
    more = {"lr_schedulers": [state]} if lightning else {"lr_scheduler": state}
    folder = write(tmp_path / "a", original if lightning else bare, Folder(3, more=more))
    convert(folder if lightning else folder / "checkpoint", tmp_path / "a.ckpt", trust=True)
    schedule = WarmupLR(torch.optim.SGD([torch.zeros(1)], lr=0.5), warmup_steps=9)
    schedule.load_state_dict(load(tmp_path / "a.ckpt")["lr_schedulers"][0])
    through = WarmupLR(torch.optim.SGD([torch.zeros(1)], lr=0.5), warmup_steps=9)
    for _ in range(3):
        through.optimizer.step()
        through.step()
    assert (schedule.last_epoch, schedule._step_count) == (through.last_epoch, through._step_count)
    schedule.step()
    through.step()
    assert schedule.get_last_lr() == through.get_last_lr()


# --------------------------------------------------------------------------------------------------------------- errors


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change what a file holds."""
    with classes():
        content = torch.load(path, weights_only=False)
        change(content)
        torch.save(content, path)


def rename(old: str, new: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / old).rename(folder / new)


def add(name: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).touch()


def change_states(name: str, change: Callable[[dict[str, Any]], None]) -> Callable[[Path], Any]:
    def damage(folder: Path) -> None:
        for file in sorted(folder.glob(name)):
            rewrite(file, lambda content: change(content.get("optimizer_state_dict", content)))

    return damage


OPTIM = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
MODEL = "zero_pp_rank_{}_mp_rank_00_model_states.pt"
DAMAGES: list[tuple[int, Callable[[Path], Any], str]] = [
    (2, lambda folder: (folder / OPTIM.format(1)).unlink(), r"2 ranks; the \*_optim_states.pt of rank 1 are missing"),
    (2, rename(OPTIM.format(1), OPTIM.format(5)), r"rank 1 are missing"),
    (2, lambda folder: shutil.copy(folder / OPTIM.format(1), folder / OPTIM.format(2)), "rank 2 are left from another"),
    (2, lambda folder: shutil.copy(folder / OPTIM.format(1), folder / f"bf16_{OPTIM.format(1)}"), "two saves"),
    (2, change_states(OPTIM.format(1), lambda s: s.update(zero_stage=1)), "one save: .* stage 2 .* stage 1 .*: remove"),
    (3, change_states(OPTIM.format(0), lambda s: s.update(zero_stage=1)), "more than one save"),
    (2, lambda folder: (folder / "mp_rank_00_model_states.pt").unlink(), "lacks mp_rank_00_model_states.pt. Copy"),
    (3, lambda folder: (folder / MODEL.format(1)).unlink(), f"stage 3, lacks {MODEL.format(1)}"),
    (3, lambda folder: [file.unlink() for file in folder.glob("*_optim_states.pt")], "At stage 0 nothing is sharded"),
    (2, lambda folder: os.truncate(folder / OPTIM.format(1), 2000), "cannot be read, it may be damaged"),
    (2, add("mp_rank_01_model_states.pt"), "tensor- or pipeline-parallel"),
    (2, add("layer_03-model_00-model_states.pt"), "pipeline-parallel"),
    (2, add("layer_0_expert_1_mp_rank_00_model_states.pt"), "mixture-of-experts"),
    (3, add("offloaded_tensors"), "NVMe"),
    (3, add("zero"), "universal checkpoint"),
    (3, change_states(MODEL.format(0), lambda s: s.update(mp_world_size=2)), "tensor- or pipeline-parallel"),
    (2, change_states("mp_rank_00_model_states.pt", lambda s: s.update(num_experts=[4])), "mixture-of-experts"),
    (2, change_states(OPTIM.format(0), lambda s: s.update(base_optimizer_state=[])), "'elastic_checkpoint'"),
    (2, change_states("mp_rank_00_model_states.pt", lambda s: s["param_shapes"][1].popitem()), "both come from one"),
    (3, change_states(MODEL.format(0), lambda s: s["param_shapes"][1].popitem()), "sub-group 1 have .* one save"),
    (3, change_states(MODEL.format(0), lambda s: s.update(shared_params={})), "'model.head.weight' has no values"),
    (2, change_states("mp_rank_00_model_states.pt", lambda s: s.pop("param_shapes")), "not have DeepSpeed's layout"),
    (
        2,
        change_states(OPTIM.format("*"), lambda s: s["base_optimizer_state"]["state"][0].update(factor=torch.ones(3))),
        "keeps 'factor' for a whole group",
    ),
]


def test_what_cannot_be_converted_is_an_error(original: dict[str, Any], tmp_path: Path) -> None:
    whole = {stage: write(tmp_path / f"stage {stage}", original, Folder(stage)) for stage in (2, 3)}
    for number, (stage, damage, message) in enumerate(DAMAGES):
        work = tmp_path / f"{number}"
        folder = shutil.copytree(whole[stage], work / "a")
        damage(folder / "checkpoint")
        with pytest.raises(CheckpointError, match=message):
            convert(folder, work / "a.ckpt", trust=True)
        assert [file.name for file in work.iterdir()] == ["a"], message


def test_wrong_paths_are_errors(original: dict[str, Any], tmp_path: Path) -> None:
    folder, out = write(tmp_path / "a", original, Folder(2)), tmp_path / "out.ckpt"
    with pytest.raises(CheckpointError, match=rf"can run any program .* convert-deepspeed {folder} {out} --trust"):
        convert(folder, out)
    with pytest.raises(CheckpointError, match="does not exist"):
        convert(tmp_path / "b", out, trust=True)
    with pytest.raises(CheckpointError, match=r"no file 'latest' and no \*_states.pt"):
        convert(tmp_path, out, trust=True)
    out.write_text("mine")
    with pytest.raises(CheckpointError, match="already exists"):
        convert(folder, out, trust=True)
    assert out.read_text() == "mine"
    convert(folder, out, trust=True, overwrite=True)
    assert load(out)["state_dict"]
    (folder / "latest").unlink()
    with pytest.raises(CheckpointError, match=f"name one of {folder / 'checkpoint'}"):
        convert(folder, out, trust=True)
    (folder / "latest").write_text("global_step7\n")
    with pytest.raises(CheckpointError, match="no folder global_step7"):
        convert(folder, out, trust=True)


# ----------------------------------------------------------------------------------------------------- DeepSpeed itself


@pytest.fixture(scope="module")
def folders(whole: tuple[Fitted, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What DeepSpeed writes when Lightning saves."""
    pytest.importorskip("deepspeed", reason="needs the extra 'peers'")
    folder = tmp_path_factory.mktemp("deepspeed")
    client = {key: value for key, value in load(whole[1]).items() if key not in ("state_dict", "optimizer_states")}
    torch.save(client, folder / "client.pt")
    path = [str(Path(__file__).parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    subprocess.run(
        [sys.executable, str(train_deepspeed.__file__), str(folder)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))},
        check=True,
        timeout=240,
    )
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_deepspeeds_own_folders(folders: Path, whole: tuple[Fitted, Path], case: str, tmp_path: Path) -> None:
    convert(folders / case, tmp_path / "a.ckpt", trust=True)
    converted, original = load(tmp_path / "a.ckpt"), load(whole[1])
    truth = torch.load(folders / f"{case}.pt", weights_only=True)
    (optimizer,) = converted["optimizer_states"]
    assert optimizer["state"].keys() == truth["saved"].keys() == original["optimizer_states"][0]["state"].keys()
    for name, values in truth["saved"].items():
        entry = optimizer["state"][name] | {"weight": converted["state_dict"][name]}
        assert int(entry.pop("step")) == SAVED
        assert_same(dict(sorted(entry.items())), dict(sorted(values.items())))
    assert list(converted["state_dict"]) == list(original["state_dict"])
    for name in FROZEN | BUFFERS:
        dtype = torch.float16 if "fp16" in case else torch.bfloat16 if "bf16" in case else torch.float32
        value = original["state_dict"][name]
        assert torch.equal(converted["state_dict"][name], value.to(dtype) if name in FROZEN else value)
    groups = [group["params"] for group in original["optimizer_states"][0]["param_groups"]]
    assert [group["params"] for group in optimizer["param_groups"]] == [
        [name for name in group if name not in FROZEN] for group in groups
    ]
    assert converted["loops"] == original["loops"]


@pytest.mark.slow
@ranks(2)
@pytest.mark.parametrize(("case", "strategy"), [("stage1", "zero3_offload"), ("stage3", "zero2")])
def test_a_run_of_deepspeed_goes_on(pool: RankPool, folders: Path, case: str, strategy: str, tmp_path: Path) -> None:
    """As DeepSpeed itself goes on."""
    convert(folders / case, tmp_path / "a.ckpt", trust=True)
    other = replace(RECIPE, seed=7)
    resumed = pool.run(run, strategy, other, Resuming, steps=STEPS, resume=str(tmp_path / "a.ckpt"))[0]
    after: dict[str, dict[str, Tensor]] = torch.load(folders / f"{case}.pt", weights_only=True)["after"]
    for name, values in after.items():
        parameter = name.removeprefix("model.")
        entry = resumed.optimizer_states[0][parameter] | {"weight": resumed.weights[parameter]}
        assert int(entry.pop("step")) == STEPS
        torch.testing.assert_close(entry, dict(values), rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["stage1_bf16", "stage2_fp16", "stage3"])
def test_the_folders_of_these_tests_are_laid_out_like_deepspeeds(folders: Path, case: str, tmp_path: Path) -> None:
    convert(folders / case, tmp_path / "a.ckpt", trust=True)
    zero = CASES[case]["zero_optimization"]
    layout = Folder(
        zero["stage"],
        half=torch.bfloat16 if "bf16" in case else torch.float16 if "fp16" in case else None,
        round_robin="round_robin_gradients" in zero,
        alignment=8 if "parameter_alignment" in zero else 1,
        sub_group=zero.get("sub_group_size", 10**9),
    )
    ours = write(tmp_path / "a", load(tmp_path / "a.ckpt"), layout) / "checkpoint"
    theirs = folders / case / "checkpoint"
    assert sorted(file.name for file in ours.iterdir()) == sorted(file.name for file in theirs.iterdir())
    for file in ours.iterdir():
        assert_same_trees(runs.load(file), runs.load(theirs / file.name), file.name)


def assert_same_trees(ours: Any, theirs: Any, place: str) -> None:
    """The same keys and values, where ours are no padding."""
    assert type(ours).__name__ == type(theirs).__name__, place
    if isinstance(ours, dict):
        ignored = {"ds_config", "lightning_zero", "ZeroPrecision", "param_slice_mappings"}
        ignored |= {"loss_scaler", "dynamic_loss_scale"}
        assert ours.keys() - ignored == theirs.keys() - ignored, place
        for key in ours.keys() - ignored:
            assert_same_trees(ours[key], theirs[key], f"{place}[{key!r}]")
    elif isinstance(ours, list):
        assert len(ours) == len(theirs), place
        for number, (our, their) in enumerate(zip(ours, theirs, strict=True)):
            assert_same_trees(our, their, f"{place}[{number}]")
    elif isinstance(ours, Tensor):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), place
        assert torch.equal(ours.where(ours == ours, 0), theirs.where(ours == ours, 0)), place
    elif isinstance(ours, runs.Remains):
        assert (ours.name, ours.args) == (theirs.name, theirs.args), place
    else:
        assert ours == theirs, place
