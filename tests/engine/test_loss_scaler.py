"""The loss scalers' rules: traces of scales over sequences of overflows equal an independent reading of the rules."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_zero import DynamicLossScaler, StaticLossScaler
from lightning_zero.update import LossScaleError, LossScaler

RAISED = -1.0  # ends a trace


class Rules(NamedTuple):
    """Options of a scaler that starts at 2^`power`; factors are 2 and 1/2."""

    power: int
    window: int
    hysteresis: int
    consecutive: bool
    raises: bool
    minimum: float = 1.0
    maximum: float | None = None

    def scaler(self) -> DynamicLossScaler:
        return DynamicLossScaler(
            init_scale=2.0**self.power,
            window=self.window,
            hysteresis=self.hysteresis,
            consecutive_hysteresis=self.consecutive,
            min_scale=self.minimum,
            max_scale=self.maximum,
            on_min_scale="raise" if self.raises else "continue",
        )


any_rules = st.builds(
    Rules,
    power=st.integers(0, 5),
    window=st.integers(1, 8),
    hysteresis=st.integers(1, 4),
    consecutive=st.booleans(),
    raises=st.booleans(),
    minimum=st.sampled_from([0.25, 1.0]),
    maximum=st.sampled_from([None, 32.0, 256.0]),
)
overflows = st.lists(st.booleans() | st.just(False), max_size=120)


def trace(scaler: DynamicLossScaler, steps: Iterable[bool]) -> list[float]:
    """The scale after every step."""
    scales = []
    for found_inf in steps:
        try:
            scaler.update(found_inf)
        except LossScaleError:
            return [*scales, RAISED]
        scales.append(scaler.scale)
    return scales


def trace_from_history(rules: Rules, steps: list[bool]) -> list[float]:
    """The same by looking back over the whole history at every step, with no state but the scale."""
    scale, scales = 2.0**rules.power, []
    refills = [0]  # indices of the first step after a refill
    marks = [0]  # indices of the first step after an overflow or a growth
    for now, found_inf in enumerate(steps):
        if found_inf:
            if sum(steps[refills[-1] : now + 1]) >= rules.hysteresis:
                if scale == rules.minimum and rules.raises:
                    return [*scales, RAISED]
                scale = max(scale / 2, rules.minimum)
            marks.append(now + 1)
        else:
            if rules.consecutive:
                refills.append(now + 1)
            if now + 1 - marks[-1] == rules.window:
                scale = min(scale * 2, rules.maximum or math.inf)
                marks.append(now + 1)
                refills.append(now + 1)
        scales.append(scale)
    return scales


@given(rules=any_rules, steps=overflows)
@example(rules=Rules(2, 3, 2, consecutive=False, raises=True), steps=[True] * 5)
@example(rules=Rules(2, 3, 2, consecutive=False, raises=False), steps=[True, False, True, False, False, False, True])
def test_traces_equal_the_rules_read_from_the_whole_history(rules: Rules, steps: list[bool]) -> None:
    assert trace(rules.scaler(), steps) == trace_from_history(rules, steps)


@pytest.fixture(scope="module")
def deepspeed_scaler() -> Iterator[Any]:
    """DeepSpeed's scaler, but its stable interval counts from an overflow instead of from the step after it."""
    module = pytest.importorskip("deepspeed.runtime.fp16.loss_scaler", reason="needs the extra 'peers'")

    class OneStepEarlier(module.DynamicLossScaler):  # type: ignore[misc, name-defined]
        def update_scale(self, overflow: bool) -> None:
            self.last_overflow_iter -= not overflow
            super().update_scale(overflow)
            self.last_overflow_iter += not overflow

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "dist", SimpleNamespace(get_rank=lambda: 1))  # it asks in order to log on rank 0
        yield OneStepEarlier


@given(rules=any_rules.map(lambda r: r._replace(maximum=None)), steps=overflows)
def test_traces_equal_deepspeeds(deepspeed_scaler: Any, rules: Rules, steps: list[bool]) -> None:
    theirs = deepspeed_scaler(
        init_scale=2.0**rules.power,
        scale_window=rules.window,
        min_scale=rules.minimum,
        delayed_shift=rules.hysteresis,
        consecutive_hysteresis=rules.consecutive,
        raise_error_at_min_scale=rules.raises,
    )
    expected: list[float] = []
    for found_inf in steps:
        try:
            theirs.update_scale(found_inf)
        except Exception as error:  # noqa: BLE001  # it raises nothing more specific
            assert "already at minimum" in str(error)  # noqa: PT017
            expected.append(RAISED)
            break
        expected.append(theirs.cur_scale)
    assert trace(rules.scaler(), steps) == expected


@given(rules=any_rules.map(lambda r: r._replace(raises=False)), steps=overflows, cut=st.integers(0, 120))
def test_a_saved_state_goes_on_as_if_nothing_had_been(rules: Rules, steps: list[bool], cut: int) -> None:
    before, after = steps[:cut], steps[cut:]
    saved = rules.scaler()
    trace(saved, before)
    state = json.loads(json.dumps(saved.state_dict()))  # plain numbers
    resumed = rules.scaler()
    resumed.load_state_dict(state)
    assert trace(resumed, after) == trace(pickle.loads(pickle.dumps(saved)), after) == trace(saved, after)


@given(rules=any_rules, steps=overflows)
def test_the_scale_stays_within_its_bounds(rules: Rules, steps: list[bool]) -> None:
    rules = rules._replace(maximum=64.0)
    assert all(scale == RAISED or rules.minimum <= scale <= 64.0 for scale in trace(rules.scaler(), steps))


def test_the_hysteresis_th_overflow_and_every_later_one_back_off_until_a_refill() -> None:
    scaler = DynamicLossScaler(init_scale=64, window=2, hysteresis=3)
    assert trace(scaler, [True, True, True, True]) == [64, 64, 32, 16]
    assert trace(scaler, [False, True]) == [16, 8]
    assert trace(scaler, [False, False]) == [8, 16]  # grown, and refilled
    assert trace(scaler, [True, True, True]) == [16, 16, 8]


def test_consecutive_hysteresis_is_refilled_by_a_clean_step() -> None:
    scaler = DynamicLossScaler(init_scale=64, hysteresis=2, consecutive_hysteresis=True)
    assert trace(scaler, [True, False] * 5) == [64] * 10
    assert trace(scaler, [True, True]) == [64, 32]


@pytest.mark.parametrize("overflow_first", [False, True])
def test_the_scale_grows_with_the_last_step_of_the_window(overflow_first: bool) -> None:
    scaler = DynamicLossScaler(init_scale=8, window=4, hysteresis=2)
    trace(scaler, [True] * overflow_first)
    assert trace(scaler, [False] * 9) == [8, 8, 8, 16, 16, 16, 16, 32, 32]


def test_an_overflow_at_the_minimum_raises_and_changes_nothing() -> None:
    scaler = DynamicLossScaler(init_scale=2, min_scale=2, hysteresis=2)
    assert trace(scaler, [True]) == [2]  # tolerated by hysteresis
    state = scaler.state_dict()
    with pytest.raises(LossScaleError, match=r"smallest loss scale, 2 .*bf16-mixed"):
        scaler.update(True)
    assert scaler.state_dict() == state
    assert scaler.at_minimum


def test_growth_ends_where_fp32_ends() -> None:
    scaler = DynamicLossScaler(init_scale=2.0**126, window=1)
    assert trace(scaler, [False] * 3) == [2.0**127] * 3


@pytest.mark.parametrize(("window", "expected"), [(3, [16, 16, 16, 32]), (6, [8, 8, 16, 16]), (50, [8, 8, 8, 8])])
def test_a_changed_window_wins_over_the_saved_one(window: int, expected: list[float]) -> None:
    saved = DynamicLossScaler(init_scale=8, window=10)
    trace(saved, [False] * 3)
    resumed = DynamicLossScaler(window=window)
    resumed.load_state_dict(saved.state_dict())
    assert trace(resumed, [False] * 4) == expected


@pytest.mark.parametrize(("hysteresis", "expected"), [(1, [4, 2]), (2, [4, 2]), (3, [8, 4]), (4, [8, 8])])
def test_a_changed_hysteresis_wins_over_the_saved_one(hysteresis: int, expected: list[float]) -> None:
    saved = DynamicLossScaler(init_scale=8, hysteresis=2)
    trace(saved, [True])
    resumed = DynamicLossScaler(hysteresis=hysteresis)
    resumed.load_state_dict(saved.state_dict())
    assert trace(resumed, [True] * 2) == expected


def test_changed_bounds_move_the_saved_scale_inside() -> None:
    state = DynamicLossScaler(init_scale=64).state_dict()
    higher, lower = DynamicLossScaler(init_scale=256, min_scale=128), DynamicLossScaler(init_scale=2, max_scale=32)
    higher.load_state_dict(state)
    lower.load_state_dict(state)
    assert (higher.scale, lower.scale) == (128, 32)


def test_a_static_scaler_takes_nothing_from_a_dynamic_one_and_gives_nothing() -> None:
    static, dynamic = StaticLossScaler(512), DynamicLossScaler()
    static.load_state_dict(dynamic.state_dict())
    dynamic.load_state_dict(static.state_dict())
    for found_inf in (True, False, True):
        static.update(found_inf)
    assert (static.scale, dynamic.scale, static.at_minimum) == (512, 2.0**16, True)
    assert isinstance(static, LossScaler)
    assert isinstance(dynamic, LossScaler)


@pytest.mark.parametrize(
    "arguments",
    [
        {"hysteresis": 0},
        {"hysteresis": -1},
        {"hysteresis": 1.5},
        {"hysteresis": True},
        {"window": 0},
        {"window": 10.0},
        {"window": "10"},
        {"growth_factor": 1.0},
        {"growth_factor": 0.5},
        {"growth_factor": math.inf},
        {"backoff_factor": 0},
        {"backoff_factor": 1},
        {"backoff_factor": 2},
        {"backoff_factor": math.nan},
        {"min_scale": 0},
        {"min_scale": -1},
        {"min_scale": math.inf},
        {"max_scale": 0.5},
        {"max_scale": math.inf},
        {"max_scale": "1"},
        {"init_scale": 0},
        {"init_scale": math.nan},
        {"init_scale": math.inf},
        {"init_scale": None},
        {"init_scale": 0.5, "min_scale": 1},
        {"init_scale": 64, "max_scale": 32},
        {"consecutive_hysteresis": 1},
        {"on_min_scale": "stop"},
        {"on_min_scale": ["raise"]},
    ],
    ids=str,
)
def test_an_argument_that_makes_no_sense_is_refused_by_name(arguments: dict[str, Any]) -> None:
    name, value = next(iter(arguments.items()))
    with pytest.raises(ValueError, match="must be") as error:
        DynamicLossScaler(**arguments)
    assert str(error.value).startswith(f"{name}={value!r} must be ")


@pytest.mark.parametrize("scale", [0, -2, math.inf, math.nan, "8", None, True])
def test_a_static_scale_that_makes_no_sense_is_refused(scale: Any) -> None:
    with pytest.raises(ValueError, match=r"scale=.* must be a finite number > 0"):
        StaticLossScaler(scale)


@pytest.mark.parametrize(
    "state",
    [
        {"scale": math.nan},
        {"scale": 0},
        {"scale": "8"},
        {"overflows": -1},
        {"overflows": math.inf},
        {"clean_steps": None},
    ],
    ids=str,
)
def test_a_saved_state_that_makes_no_sense_is_refused_and_nothing_changes(state: dict[str, Any]) -> None:
    scaler = DynamicLossScaler()
    before = scaler.state_dict()
    with pytest.raises(ValueError, match=r"the saved .* must be"):
        scaler.load_state_dict({**before, **state})
    assert scaler.state_dict() == before
