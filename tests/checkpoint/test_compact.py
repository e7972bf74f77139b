"""8-bit optimizer state in checkpoints as it is kept: any strategy and number of ranks resumes any other's."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.remote import register
from checkpoint.resuming import StatefulLoader, run
from checkpoint.test_full import ALONE
from checkpoint.test_sharded import assert_equal_trees, verb
from helpers import models
from helpers.ranks import RankPool, ranks
from lightning import Fabric
from lightning.pytorch.plugins.io import TorchCheckpointIO
from strategy.fits import Fitted, Lit, Recipe, assert_same, assert_same_states, make_trainer, observe

from lightning_zero import CPUAdamW, CPULion, ZeroFabricStrategy, ops
from lightning_zero.checkpoint import file, load, locate, shards
from lightning_zero.integration import engines
from lightning_zero.integration.checkpointing import FileCheckpointIO
from lightning_zero.integration.names import STRATEGIES
from lightning_zero.sharding.memory_format import MemoryFormat
from lightning_zero.tools import consolidate
from lightning_zero.tools.contents import cast, describe
from lightning_zero.update import Blocks, compact, decoded, holds_compact

RECIPE = Recipe(model="wide", steps=6, options={"lr": 0.05, "state_dtype": "int8", "seed": 3})
SAVED = 4  # steps
OTHERS: dict[str, dict[str, Any]] = {
    "replicated": {"stage": 2, "offload_optimizer": "cpu", "shard_size": 2},
    "background": {"stage": 2, "checkpoint_format": "sharded", "async_save": True},
    "folder": {"stage": 3, "checkpoint_format": "sharded"},
}


class InBlocks(Lit):
    """The same batches on all ranks, so that runs have the same bits on any number of them."""

    optimizer: Any = CPUAdamW

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.model.parameters(), **self.recipe.options)

    def train_dataloader(self) -> StatefulLoader:
        return StatefulLoader(models.rank_batches(self.recipe.batches(1), 0))


class Torchs(InBlocks):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.model.parameters(), lr=self.recipe.options["lr"])


def strategy_of(name: str, path: str) -> dict[str, Any]:
    options = OTHERS.get(name) or STRATEGIES[name]
    if name.endswith("nvme"):
        options = options | {
            "nvme_path": str(Path(path.partition("://")[2] or path).parent),
            "nvme_buffer_gb": 2.0**-12,
        }
    return {"persistence_numel": 0} | options


def train(name: str, path: str | None = None, form: str = "compact", **options: Any) -> Fitted:
    register()
    strategy = name if name == "ddp" else {**strategy_of(name, path or options["resume"]), "checkpoint_state": form}
    recipe = dataclasses.replace(RECIPE, seed=7 if "resume" in options else 0)
    module = options.pop("module", InBlocks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "PIECE", 1000)  # bytes: parameters lie across pieces
        patch.setattr(compact, "_TILE", 300)
        return run(strategy, recipe, module, steps=6, **({"save": (SAVED, path)} if path else {}), **options)


@pytest.mark.parametrize(
    ("first", "ranks_of_first", "second", "ranks_of_second", "protocol"),
    [
        ("zero2_offload", 2, "zero3_nvme", 1, ""),
        *(
            pytest.param(*values, marks=pytest.mark.slow)
            for values in [
                ("zero3_nvme", 2, "zero0", 4, ""),
                ("background", 2, "zero1", 1, ""),
                ("zero0", 1, "zero3_offload", 4, ""),
                ("replicated", 4, "zero2", 2, ""),
                ("folder", 4, "zero2_nvme", 2, ""),
                ("zero3", 2, "folder", 2, "shared://"),
            ]
        ),
    ],
)
def test_any_resumes_any_other(
    rank_pools: Any, first: str, ranks_of_first: int, second: str, ranks_of_second: int, protocol: str, tmp_path: Path
) -> None:
    """To the bit; what is decoded is what the other form holds, at more than three times the bytes."""
    register()
    path, plain = (f"{protocol}{tmp_path}/{name}.ckpt" for name in ("compact", "plain"))
    whole: list[Fitted] = rank_pools(ranks_of_first).run(train, first, path)
    rank_pools(ranks_of_first).run(train, first, plain, "fp32")
    (ours,), (theirs,) = (load(locate(each), ALONE)["optimizer_states"] for each in (path, plain))
    assert holds_compact(ours)
    assert not holds_compact(theirs)
    assert_equal_trees(decoded(ours), theirs)
    for each in (path, plain):  # from fp32, too
        (resumed, *_) = rank_pools(ranks_of_second).run(train, second, resume=each)
        assert_same(resumed.weights, whole[0].weights)
        assert_same_states(resumed.optimizer_states[0], whole[0].optimizer_states[0])
    if protocol == "":
        sizes = [describe(Path(each)).optimizer_bytes for each in (path, plain)]
        assert sizes[0] < 0.26 * sizes[1]


class Io(TorchCheckpointIO):
    """Somebody's own."""


class Lions(InBlocks):
    optimizer = CPULion


def train_in_cut_blocks(path: str, form: str, resume: str | None = None, plugins: tuple[type, ...] = ()) -> Fitted:
    """As where a module is sharded before its optimizer is known."""
    options = {**strategy_of("zero3", path), "checkpoint_state": form}
    flags: dict[str, Any] = {"max_epochs": -1, "plugins": [plugin() for plugin in plugins]}
    trainer = make_trainer(options, max_steps=6 if resume else SAVED, **flags)
    module = Lions(dataclasses.replace(RECIPE, seed=7 if resume else 0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "block_of", lambda _: 1)
        trainer.fit(module, ckpt_path=resume)
    trainer.save_checkpoint(path)
    return observe(trainer, module)


@ranks(2)
def test_blocks_that_a_shard_border_cuts_keep_both_scales(pool: RankPool, tmp_path: Path) -> None:
    """Also where a CheckpointIO of somebody's own writes, for which rank 0 gathers; checkpoints are alike then."""
    paths = {name: str(tmp_path / f"{name}.ckpt") for name in ("fp32", "compact", "own", "resumed", "expected")}
    pool.run(train_in_cut_blocks, paths["fp32"], "fp32")
    for name, plugins in (("compact", ()), ("own", (Io,))):
        pool.run(train_in_cut_blocks, paths[name], "compact", None, plugins)
    (plain,), (ours,), (gathered,) = (states_in(paths[name]) for name in ("fp32", "compact", "own"))
    moments = [state["compact"]["exp_avg"] for state in ours["state"].values()]
    assert any(len(moment["blocks"]["starts"]) > 1 for moment in moments)
    assert_equal_trees(decoded(ours), plain)
    assert_equal_trees(gathered, ours)
    for name, start in (("resumed", "compact"), ("expected", "fp32")):
        pool.run(train_in_cut_blocks, paths[name], "fp32", paths[start])
    assert_equal_trees(*(states_in(paths[name]) for name in ("resumed", "expected")))


def states_in(path: str) -> list[dict[str, Any]]:
    return load(Path(path), ALONE)["optimizer_states"]


@pytest.fixture(scope="module")
def saved(pool2: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "compact.ckpt"
    pool2.run(train, "zero3_offload", str(path))
    return path


def fail_to_resume(path: str) -> str:
    with pytest.raises(ValueError, match="in 8 bits") as caught:
        train("ddp", resume=path, module=Torchs)
    return str(caught.value)


def test_other_strategies_say_what_to_do_and_resume_after_it(saved: Path, pool1: RankPool, tmp_path: Path) -> None:
    assert pool1.run(fail_to_resume, str(saved))[0].count("lightning-zero consolidate CHECKPOINT NEW_FILE") == 1
    one = tmp_path / "one.ckpt"
    assert verb("consolidate", saved, one).exit_code == 0
    assert "needs no consolidation" in verb("consolidate", one, tmp_path / "two.ckpt").output
    before, after = load(saved, ALONE), load(one, ALONE)
    assert_equal_trees(after, {**before, "optimizer_states": decoded(before["optimizer_states"])})
    assert pool1.run(train, "ddp", resume=str(one), module=Torchs)[0].steps == 6
    # Into fp32 state it is decoded on the way.
    ours, theirs = (pool1.run(train, "zero2", resume=str(each), module=Torchs)[0] for each in (saved, one))
    assert_same(ours.weights, theirs.weights)
    # Under the Hydra groups they read it as it is.
    assert_equal_trees(FileCheckpointIO().load_checkpoint(saved), after)
    # So does a CPU optimizer: what it has loaded it holds in 8 bits, without loss.
    with torch.random.fork_rng(devices=()):
        optimizer = CPUAdamW(RECIPE.make_model().parameters(), state_dtype="int8")
    (state,) = before["optimizer_states"]
    optimizer.load_state_dict(state)
    (expected,) = after["optimizer_states"]
    for found, saved_state in zip(optimizer.state_dict()["state"].values(), expected["state"].values(), strict=True):
        assert_equal_trees(found, saved_state)


def test_weights_of_a_file_are_converted_a_tile_at_a_time(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = torch.load(saved, weights_only=True)
    weights = checkpoint["state_dict"]
    name, weight = max(weights.items(), key=lambda entry: entry[1].numel())
    weights |= {"tied": weight.detach(), "transposed": weight.clone().t()}
    torch.save(checkpoint, tmp_path / "a.ckpt")
    tiles = []

    def observed(name: str, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        tiles.append(values.numel())
        return cast(name, values, dtype)

    monkeypatch.setattr(consolidate, "cast", observed)
    monkeypatch.setattr(file, "TILE", 256)
    assert verb("consolidate", tmp_path / "a.ckpt", tmp_path / "b.ckpt", "--dtype", "bf16").exit_code == 0
    assert max(tiles) == 128
    found = torch.load(tmp_path / "b.ckpt", weights_only=True)["state_dict"]
    assert_equal_trees(found, {name: value.to(torch.bfloat16) for name, value in weights.items()})
    assert found["tied"].data_ptr() == found[name].data_ptr()


def test_tools_read_it(saved: Path) -> None:
    entries = {entry.name: entry for entry in describe(saved).optimizers[0].state}
    assert entries["exp_avg"].dtypes == entries["exp_avg_sq"].dtypes == ["int8", "uint8"]
    numel = sum(parameter.numel() for parameter in RECIPE.make_model().parameters())
    assert numel < entries["exp_avg"].bytes < numel * 1.01 + 10
    assert entries["step"].dtypes == ["float32"]
    (state,) = load(saved, ALONE)["optimizer_states"]
    for entry in state["state"].values():
        entry["compact"]["exp_avg"]["scales"] = torch.zeros(1000, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"scales of 8-bit state .* have shape \(1000,\); expected \(\d+,\)"):
        decoded(state)


def test_elements_are_counted_in_any_order_of_memory() -> None:
    """Of channels_last weights that were written by a module whose weights are not, or the other way around."""
    values = torch.randn(8, 3, 5, 7)
    stored = values.to(memory_format=torch.channels_last)
    form, other = MemoryFormat.of(stored), MemoryFormat.of(values)
    blocks = Blocks(True, form, (0, 300))
    codes, scales = torch.zeros(840, dtype=torch.int8), torch.zeros(2 + 3, dtype=torch.uint8)
    for low, high, first in ((0, 300, 0), (300, 840, 2)):
        part = ops.Quantized(codes[low:high], scales[first : first + ops.count_blocks(low, high - low)])
        ops.quantize_(form.flatten(stored)[low:high].contiguous(), part, signed=True, index=low)
    full = blocks.full(codes, scales)
    assert (full - values).abs().max() < 0.05 * values.abs().max()
    for order in (form, other):
        into = torch.empty(500, dtype=torch.bfloat16)
        blocks.decode(codes, scales, order, 200, into)
        assert torch.equal(into, order.flatten(full)[200:700].bfloat16())


def save_with_fabric(path: str, resume: bool) -> Any:
    fabric = Fabric(strategy=ZeroFabricStrategy(stage=2, checkpoint_state="compact"), accelerator="cpu", devices=1)
    fabric.launch()
    model = RECIPE.make_model()
    model, optimizer = fabric.setup(model, CPUAdamW(model.parameters(), **RECIPE.options))
    if resume:
        fabric.load(path, {"model": model, "optimizer": optimizer})
    for batch in [] if resume else models.rank_batches(RECIPE.batches(1), 0)[:3]:
        fabric.backward(models.next_token_loss(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    if not resume:
        fabric.save(path, {"model": model, "optimizer": optimizer})
    return fabric.strategy.get_optimizer_state(optimizer)["state"]


def test_fabric_has_the_option(pool1: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "a.ckpt")
    (saved,) = pool1.run(save_with_fabric, path, False)
    assert holds_compact(load(Path(path), ALONE)["optimizer"])
    (loaded,) = pool1.run(save_with_fabric, path, True)
    assert_equal_trees(loaded, saved)


def test_what_others_call_compact_is_theirs() -> None:
    """A parameter of that name, hyperparameters, and a parameter that is called step beside it."""
    theirs = {
        "optimizer_states": [{"state": {"compact": {"step": 1.0}, "step": {"step": 2.0}}}],
        "hyper_parameters": {"lr": 0.1, "compact": {"layers": 2}},
    }
    assert not holds_compact(theirs)
    assert decoded(theirs) == theirs
    assert decoded(theirs["optimizer_states"][0]["state"]) == theirs["optimizer_states"][0]["state"]  # type: ignore[index]
