"""Checkpoints of optimizers with state of any shape: any strategy on any number of ranks resumes any other's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.resuming import Resumable, run
from checkpoint.test_matrix import OVERFLOWS, SAVED, STEPS, Traced
from helpers.ranks import RankPool
from helpers.whole import OF_LIBRARIES, CountsSteps
from strategy.fits import DDP, Fitted, Recipe, assert_close, assert_same, assert_same_states
from torch import Tensor

import lightning_zero
from lightning_zero import DynamicLossScaler, ZeroPrecision
from lightning_zero.integration.names import STRATEGIES
from lightning_zero.update import load_own_entries, own_entries

ASKED = ("blocks.1.up.weight", "norm.weight")


class Asked(Traced):
    """Notes at the end what user code gets of the state and the values of two parameters."""

    def on_train_end(self) -> None:
        parameters = map(self.model.get_parameter, ASKED)
        self.notes = [(lightning_zero.full_optimizer_state(p), lightning_zero.full_param(p)) for p in parameters]


class Plain(Traced):
    """Leaves out the steps that overflow."""

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.batch = batch
        return super(Traced, self).training_step(batch, index)

    def optimizer_step(self, epoch: int, index: int, optimizer: Any, closure: Any = None) -> None:
        closure()
        if overflows := self.trainer.global_step in OVERFLOWS:
            optimizer.zero_grad()
        before = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        optimizer.step()  # by which Lightning counts
        for group, kept in zip(optimizer.param_groups, before, strict=True) if overflows else ():
            group.update(kept)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        if self.trainer.global_step - 1 not in OVERFLOWS:
            scheduler.step()

    def on_train_batch_end(self, *_: Any) -> None: ...


def train(name: str, optimizer: str, **options: Any) -> Fitted:
    """A run with these options of `resuming.run`, in which gradients overflow."""
    seed = 7 if "resume" in options else 0
    dtype = torch.float32 if optimizer in OF_LIBRARIES else torch.float64
    recipe = Recipe(optimizer=optimizer, steps=3, dtype=dtype, scheduled=True, seed=seed)
    if name == "ddp":
        return run(name, recipe, Plain, steps=STEPS, **options)
    plugin = ZeroPrecision(
        "32-true" if optimizer in OF_LIBRARIES else "64-true",
        scaler=DynamicLossScaler(init_scale=2.0**10, window=3, hysteresis=2),
    )
    here = str(Path(options.get("resume") or options["save"][1]).parent)
    strategies: dict[str, Any] = {
        "folder": {"stage": 3, "checkpoint_format": "sharded"},
        "disk": STRATEGIES["zero3_nvme"] | {"nvme_path": here, "nvme_buffer_gb": 2.0**-12},
    }
    return run(strategies.get(name, name), recipe, Asked, steps=STEPS, plugins=[plugin], **options)


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("optimizer", "first", "ranks_of_first", "second", "ranks_of_second"),
    [
        ("shampoo", "zero3", 2, "zero1", 1),
        ("adafactor", "ddp", 2, "zero3", 2),
        slow("shampoo", "zero3", 4, "ddp", 2),
        slow("adafactor", "folder", 2, "zero2_offload", 4),
        slow("adafactor", "zero2_offload", 4, "folder", 2),
        slow("shampoo", "zero0", 1, "zero3_offload", 2),
        slow("bitsandbytes.optim.AdamW8bit", "zero3", 2, "zero2_offload", 2),
        slow("pytorch_optimizer.SOAP", "zero2", 2, "zero3", 2),
        slow("muon_and_adamw", "zero3", 4, "zero2_offload", 2),
        slow("muon_and_adamw", "disk", 2, "ddp", 2),
        slow("lamb", "zero1", 2, "disk", 2),
    ],
)
def test_any_resumes_any_other(
    rank_pools: Any,
    optimizer: str,
    first: str,
    ranks_of_first: int,
    second: str,
    ranks_of_second: int,
    tmp_path: Path,
) -> None:
    if optimizer in OF_LIBRARIES:
        pytest.importorskip(optimizer.partition(".")[0])
    path = str(tmp_path / "saved.ckpt")
    whole: Fitted = rank_pools(ranks_of_first).run(train, first, optimizer, save=(SAVED, path))[0]
    resumed: Fitted = rank_pools(ranks_of_second).run(train, second, optimizer, resume=path)[0]
    compare = assert_same if ranks_of_first == ranks_of_second else assert_close
    compare(resumed.weights, whole.weights)
    (states,), (expected,) = resumed.optimizer_states, whole.optimizer_states
    if "ddp" not in (first, second):  # whose states have numbers for names
        torch.testing.assert_close(states, expected, rtol=1e-7, atol=1e-10)  # of dtypes, too
    for name, (state, weight) in zip(ASKED, resumed.notes, strict=True) if second != "ddp" else ():
        torch.testing.assert_close(state, states[name], rtol=0, atol=0)
        assert torch.equal(weight, resumed.weights[name])


@pytest.mark.slow
def test_muons_adamw_goes_on_in_the_kernel_and_without(pool2: RankPool, tmp_path: Path) -> None:
    path, recipe = str(tmp_path / "saved.ckpt"), Recipe(optimizer="muon_and_adamw", steps=3, scheduled=True)
    whole = pool2.run(run, "zero2_offload", recipe, Resumable, steps=6, save=(3, path))[0]
    for name, rounds in (("zero3_offload", False), ("zero1", True), (DDP, True)):
        resumed = pool2.run(run, name, Recipe(**vars(recipe) | {"seed": 7}), Resumable, steps=6, resume=path)[0]
        assert_same(resumed.weights, whole.weights, native=rounds)
        if name != DDP:  # whose states have numbers for names
            assert_same_states(resumed.optimizer_states[0], whole.optimizer_states[0], native=rounds)


class Counts(CountsSteps):
    """Saves the count beside the state."""

    def rule(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["sum"] = torch.zeros_like(parameter)
        parameter.add_(state["sum"].add_(gradient), alpha=-group["lr"] / self.calls)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "calls": self.calls}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.calls = state_dict["calls"]


class Counting(Resumable):
    def configure_optimizers(self) -> Any:
        return Counts(self.parameters())


@pytest.mark.parametrize(("first", "second"), [("sharded", "full"), ("full", DDP), (DDP, "sharded")])
def test_what_the_state_dict_of_an_optimizer_adds_is_resumed(
    pool2: RankPool, first: str, second: str, tmp_path: Path
) -> None:
    forms: dict[str, Any] = {form: {"stage": 3, "checkpoint_format": form} for form in ("full", "sharded")}
    path, recipe = str(tmp_path / "saved.ckpt"), Recipe(steps=4, dtype=torch.float64)
    same: dict[str, Any] = {"module": Counting, "steps": 4, "precision": "64-true"}
    whole = pool2.run(run, forms.get(first, first), recipe, save=(2, path), **same)[0]
    resumed = pool2.run(run, forms.get(second, second), recipe, resume=path, **same)[0]
    assert_close(resumed.weights, whole.weights)


class NeedsState(Counts):
    def state_dict(self) -> dict[str, Any]:
        sums = [self.state[parameter]["sum"].sum() for group in self.param_groups for parameter in group["params"]]
        return {**super().state_dict(), "sums": sums}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict["state"][0]["sum"].sum() == state_dict["sums"][0]
        super().load_state_dict(state_dict)


def test_what_it_adds_from_the_state_is_said_to_be_lost() -> None:
    optimizer = NeedsState([torch.nn.Parameter(torch.zeros(3))])
    with pytest.warns(UserWarning, match=r"NeedsState.state_dict\(\) fails where there is no state"):
        assert own_entries(optimizer) == {}
    with pytest.warns(UserWarning, match=r"NeedsState.load_state_dict\(\) fails .* state and groups, 'sums', is"):
        load_own_entries(optimizer, {"sums": [1.0]})
