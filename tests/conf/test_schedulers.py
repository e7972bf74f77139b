"""Learning-rate schedules: values against tables worked out by hand, and against DeepSpeed's where it is there."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LRScheduler

from lightning_zero.config.schemas import WarmupType
from lightning_zero.schedulers import OneCycleLR, WarmupCosineLR, WarmupDecayLR, WarmupLR


def run(scheduler: LRScheduler, steps: int) -> list[float]:
    """Learning rates of the first group at the first ``steps`` optimizer steps."""
    seen = []
    for _ in range(steps):
        seen.append(scheduler.optimizer.param_groups[0]["lr"])
        scheduler.optimizer.step()
        scheduler.step()
    return seen


def sgd(*rates: float) -> SGD:
    """An optimizer with a group for each rate."""
    return SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in rates])


# -- cosine --


def test_cosine_warms_up_and_ends_at_the_minimum() -> None:
    seen = run(WarmupCosineLR(sgd(2.0), total_steps=10, warmup_steps=3, min_lr_ratio=0.1), 12)
    assert seen[:4] == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert seen[3:11] == sorted(seen[3:11], reverse=True)
    assert seen[10:] == pytest.approx([0.2, 0.2])


def test_a_rate_may_stay_what_it_is() -> None:
    assert run(WarmupCosineLR(sgd(2.0), total_steps=4, min_lr_ratio=1.0), 6) == [2.0] * 6
    assert run(WarmupLR(sgd(2.0), min_lr=2.0, warmup_steps=3), 6) == [2.0] * 6


def test_cosine_resumes_where_it_was() -> None:
    optimizer = AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = WarmupCosineLR(optimizer, total_steps=10, warmup_steps=2)
    for _ in range(5):
        optimizer.step()
        scheduler.step()
    fresh = WarmupCosineLR(AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0), total_steps=10, warmup_steps=2)
    fresh.load_state_dict(scheduler.state_dict())
    assert fresh.get_last_lr() == scheduler.get_last_lr()
    assert fresh.get_lr() == scheduler.get_lr()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"total_steps": 10, "warmup_steps": 10}, "warmup_steps=10 must be .* less than total_steps=10"),
        ({"total_steps": 10, "warmup_steps": -1}, "warmup_steps=-1 must be at least 0"),
        ({"total_steps": 10, "min_lr_ratio": 1.5}, "min_lr_ratio=1.5 must lie between 0 and 1"),
    ],
)
def test_impossible_cosines_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WarmupCosineLR(sgd(2.0), **arguments)


# -- DeepSpeed's --

# Steps 0, 1, ...: the share of the way from minimum to maximum, for a warm-up of 4 steps.
LOG = [0.0, 0.0, 0.5, math.log(3) / math.log(4), 1.0, 1.0]
LINEAR = [0.0, 0.0, 0.25, 0.5, 0.75, 1.0]
DECAY = [0.75, 0.5, 0.25, 0.0, 0.0]  # follows them where all is over after 8 steps


@pytest.mark.parametrize(("warmup_type", "rise"), [("log", LOG), ("linear", LINEAR)])
def test_warmup_goes_deepspeeds_way(warmup_type: str, rise: list[float]) -> None:
    arguments: dict[str, Any] = {"min_lr": 0.1, "max_lr": 1.1, "warmup_steps": 4, "warmup_type": warmup_type}
    seen = run(WarmupLR(sgd(7.0), **arguments), 11)
    assert seen == pytest.approx([0.1 + share for share in [*rise, 1.0, 1.0, 1.0, 1.0, 1.0]])
    seen = run(WarmupDecayLR(sgd(7.0), total_steps=8, **arguments), 11)
    assert seen == pytest.approx([0.1 + share for share in [*rise, *DECAY]])


def test_deepspeeds_names_of_arguments_are_taken() -> None:
    """The `params` of its configuration as they are."""
    params: dict[str, Any] = {
        "warmup_min_lr": 0.1,
        "warmup_max_lr": 1.1,
        "warmup_num_steps": 4,
        "last_batch_iteration": -1,
    }
    assert run(WarmupLR(sgd(7.0), **params), 5) == pytest.approx([0.1 + share for share in LOG[:5]])
    decay = WarmupDecayLR(sgd(7.0), **params, total_num_steps=8)
    assert run(decay, 11) == pytest.approx([0.1 + share for share in [*LOG, *DECAY]])
    with pytest.raises(TypeError, match="warmup_num_steps=5 is DeepSpeed's name of warmup_steps=4, "):
        WarmupLR(sgd(7.0), warmup_steps=4, warmup_num_steps=5)
    with pytest.raises(TypeError, match="total_num_steps"):
        WarmupLR(sgd(7.0), total_num_steps=8)


def test_the_tutorials_warmup() -> None:
    """0 to 1e-3 in 1,000 steps: step t has 1e-3 * log(t) / log(1000), a decimal logarithm over 3."""
    seen = run(WarmupLR(sgd(1e-3), warmup_steps=1000), 1002)
    assert [seen[t] for t in (0, 1, 10, 100, 1000, 1001)] == pytest.approx([0, 0, 1e-3 / 3, 2e-3 / 3, 1e-3, 1e-3])


def test_each_group_warms_up_to_its_own_rate() -> None:
    optimizer = sgd(1.0, 0.5)
    run(WarmupLR(optimizer, warmup_steps=4, warmup_type="linear"), 3)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]


def test_a_warmup_of_one_step_counts_as_two() -> None:
    assert run(WarmupLR(sgd(1.0), warmup_steps=1), 4) == [0.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize("warmup_type", ["log", "linear"])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_warmups_equal_deepspeeds_own(warmup_type: str, steps: int) -> None:
    theirs = pytest.importorskip("deepspeed.runtime.lr_schedules", reason="needs the extra 'peers'")
    names = {"warmup_min_lr": 0.2, "warmup_max_lr": 1.0, "warmup_num_steps": steps, "warmup_type": warmup_type}
    ours: dict[str, Any] = {"min_lr": 0.2, "max_lr": 1.0, "warmup_steps": steps, "warmup_type": warmup_type}
    for our, their in (
        (WarmupLR(sgd(3.0), **ours), theirs.WarmupLR(sgd(3.0), **names)),
        (WarmupDecayLR(sgd(3.0), 12, **ours), theirs.WarmupDecayLR(sgd(3.0), 12, **names)),
    ):
        assert run(our, 20) == pytest.approx(run(their, 20), rel=1e-14)


def test_a_warmup_resumes_from_what_torch_loads_safely() -> None:
    scheduler = WarmupDecayLR(sgd(1.0), total_steps=20, warmup_steps=5, warmup_type=WarmupType.linear)
    run(scheduler, 4)
    file = io.BytesIO()
    torch.save(scheduler.state_dict(), file)
    file.seek(0)
    fresh = WarmupDecayLR(sgd(1.0), total_steps=20, warmup_steps=5, warmup_type="linear")
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert fresh.get_lr() == scheduler.get_lr()
    assert run(fresh, 10)[1:] == run(scheduler, 10)[1:]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"warmup_steps": 0}, "warmup_steps=0 must be at least 1"),
        ({"warmup_type": "exp"}, "warmup_type='exp' must be 'log' or 'linear'"),
        ({"min_lr": -0.1}, "min_lr=-0.1 must be at least 0 and at most the optimizer's lr=1.0"),
        ({"min_lr": 0.2, "max_lr": 0.1}, "min_lr=0.2 must be at least 0 and at most max_lr=0.1"),
        ({"warmup_steps": 10}, "warm-up of 10 steps must be shorter than total_steps=10"),
        ({"warmup_steps": 1, "total_steps": 2}, "warm-up of 2 steps must be shorter than total_steps=2"),
    ],
)
def test_impossible_warmups_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WarmupDecayLR(sgd(1.0), **{"total_steps": 10, "warmup_steps": 5, **arguments})


# -- one cycle --


def test_one_cycle_peaks_at_each_groups_own_rate() -> None:
    optimizer = sgd(1.0, 0.5)
    scheduler = OneCycleLR(optimizer, total_steps=10, pct_start=0.4, div_factor=10.0, final_div_factor=100.0)
    assert scheduler.get_last_lr() == pytest.approx([0.1, 0.05])
    run(scheduler, 3)  # int(0.4 * 10) - 1
    assert scheduler.get_last_lr() == pytest.approx([1.0, 0.5])
    run(scheduler, 6)
    assert scheduler.get_last_lr() == pytest.approx([1e-3, 5e-4])


@pytest.mark.parametrize("name", ["div_factor", "final_div_factor"])
def test_impossible_cycles_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=-1.0.* must be greater than 0"):
        OneCycleLR(sgd(1.0), total_steps=10, **{name: -1.0})  # type: ignore[arg-type]


# -- resuming --


@pytest.mark.parametrize(
    "make",
    [
        lambda steps: WarmupCosineLR(sgd(1.0), total_steps=steps, warmup_steps=1),
        lambda steps: WarmupDecayLR(sgd(1.0), total_steps=steps, warmup_steps=2),
        lambda steps: OneCycleLR(sgd(1.0), total_steps=steps, cycle_momentum=False),
    ],
    ids=["cosine", "warmup_decay", "onecycle"],
)
@pytest.mark.parametrize("complete", [True, False])
def test_a_resumed_run_may_be_longer(make: Callable[[int], LRScheduler], complete: bool) -> None:
    """Also where the file has the arguments of the shorter one, as torch's schedulers save theirs."""
    short, longer = make(4), make(20)
    run(short, 4)
    state = {k: v for k, v in vars(short).items() if k != "optimizer"} if complete else short.state_dict()
    longer.load_state_dict(state)
    longer.optimizer.load_state_dict(short.optimizer.state_dict())
    longer.step()
    assert run(longer, 10) == pytest.approx(run(make(20), 15)[5:])
