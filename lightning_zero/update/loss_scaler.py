"""Loss scalers: state machines that choose the factor by which an fp16 loss is multiplied before backward.

fp16 gradients below 6e-8 become zero, and those above 65504 become infinite. The largest factor without overflow
preserves most of them (https://arxiv.org/abs/1710.03740). Loss scalers hold plain numbers and no tensors, so that all
ranks that see the same sequence of overflows are in the same state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, Protocol, get_args, runtime_checkable

from typing_extensions import override

from lightning_zero.advice import Case, advice

OnMinScale = Literal["raise", "continue"]


class LossScaleError(RuntimeError):
    """Raised when gradients overflow at the smallest scale, so that no lower scale can be tried."""


@runtime_checkable
class LossScaler(Protocol):
    """Interface of a loss scaler."""

    @property
    def scale(self) -> float:
        """The factor for the loss of the next backward."""
        ...

    @property
    def at_minimum(self) -> bool:
        """Whether no lower scale will be tried."""
        ...

    def update(self, found_inf: bool) -> None:
        """Take note of one step, which used gradients that were computed at :attr:`scale`.

        Args:
            found_inf: whether a gradient was not finite on any rank, so that the step was skipped.

        Raises:
            LossScaleError: the scale should fall and cannot.
        """
        ...

    def state_dict(self) -> dict[str, float]:
        """All values that change during training, as plain numbers. The configuration is not among them."""
        ...

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from ``state``, with this object's own configuration."""
        ...


class StaticLossScaler(LossScaler):
    """Always has the same scale. An overflow skips the step and does not change the scale.

    Args:
        scale: the factor, finite and greater than 0.

    Raises:
        ValueError: ``scale`` is not finite or not greater than 0.
    """

    def __init__(self, scale: float) -> None:
        _check("scale", scale, "a finite number > 0", _is_number(scale) and 0 < scale < math.inf)
        self._scale = float(scale)

    @property
    @override
    def scale(self) -> float:
        return self._scale

    @property
    @override
    def at_minimum(self) -> bool:
        return True

    @override
    def update(self, found_inf: bool) -> None:
        """Do nothing: the scale is constant."""

    @override
    def state_dict(self) -> dict[str, float]:
        return {}

    @override
    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Do nothing: the scale is part of the configuration."""

    def __repr__(self) -> str:
        return f"StaticLossScaler({self._scale:g})"


class DynamicLossScaler(LossScaler):
    """Lowers the scale when gradients overflow, and raises it when they have not overflowed for a while.

    The ``hysteresis``-th overflow since the last refill lowers the scale, and so does every later one until the next
    refill. After ``window`` steps without overflow since the last overflow or growth, the scale grows and hysteresis is
    refilled. These are DeepSpeed's rules, except that DeepSpeed's window is one step longer, because it counts from the
    step after an overflow.

    Args:
        init_scale: the first scale.
        growth_factor: multiplies the scale when it grows; > 1. With powers of two, scaling causes no rounding.
        backoff_factor: multiplies the scale when it falls; between 0 and 1, both excluded.
        window: number of steps without overflow until the scale grows; >= 1.
        hysteresis: number of overflows until the scale falls; >= 1. If it is above 1, a single bad batch costs a step
            but does not lower the scale.
        min_scale: lower bound of the scale; > 0.
        max_scale: upper bound of the scale, at most 2^127, the largest power of two in fp32; ``None``: 2^127.
        consecutive_hysteresis: refill hysteresis at every step without overflow, so that only overflows in a row count.
        on_min_scale: what happens when the scale should fall and is at ``min_scale``: ``"raise"`` raises an error,
            ``"continue"`` skips steps until one does not overflow.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        window: int = 1000,
        hysteresis: int = 2,
        min_scale: float = 1.0,
        max_scale: float | None = None,
        consecutive_hysteresis: bool = False,
        on_min_scale: OnMinScale = "raise",
    ) -> None:
        for name, number in (
            ("init_scale", init_scale),
            ("growth_factor", growth_factor),
            ("backoff_factor", backoff_factor),
            ("min_scale", min_scale),
            ("max_scale", _LARGEST_SCALE if max_scale is None else max_scale),
        ):
            _check(name, number, "a number", _is_number(number))
        for name, count in (("window", window), ("hysteresis", hysteresis)):
            whole = isinstance(count, int) and not isinstance(count, bool)
            _check(name, count, "a whole number >= 1", whole and count >= 1)
        _check("growth_factor", growth_factor, "finite and > 1", 1 < growth_factor < math.inf)
        _check("backoff_factor", backoff_factor, "between 0 and 1, both excluded", 0 < backoff_factor < 1)
        _check("min_scale", min_scale, "finite and > 0", 0 < min_scale < math.inf)
        highest = _LARGEST_SCALE if max_scale is None else max_scale
        between = f"between min_scale={min_scale:g} and 2**127"
        _check("max_scale", max_scale, f"None or {between}", min_scale <= highest <= _LARGEST_SCALE)
        between = f"between min_scale={min_scale:g} and max_scale={highest:g}"
        _check("init_scale", init_scale, between, min_scale <= init_scale <= highest)
        _check("consecutive_hysteresis", consecutive_hysteresis, "a bool", isinstance(consecutive_hysteresis, bool))
        allowed = " or ".join(map(repr, get_args(OnMinScale)))
        _check("on_min_scale", on_min_scale, allowed, on_min_scale in get_args(OnMinScale))
        self.init_scale = float(init_scale)
        self.growth_factor = float(growth_factor)
        self.backoff_factor = float(backoff_factor)
        self.window = window
        self.hysteresis = hysteresis
        self.min_scale = float(min_scale)
        self.max_scale = float(highest)
        self.consecutive_hysteresis = consecutive_hysteresis
        self.on_min_scale = on_min_scale
        self._scale = self.init_scale
        self._clean_steps = 0  # since the last overflow or growth
        self._overflows = 0  # since the last refill

    @property
    @override
    def scale(self) -> float:
        return self._scale

    @property
    @override
    def at_minimum(self) -> bool:
        return self._scale <= self.min_scale

    @override
    def update(self, found_inf: bool) -> None:
        """Take note of one step; see :class:`LossScaler`.

        Raises:
            LossScaleError: the scale should fall below ``min_scale``, and ``on_min_scale`` is ``"raise"``. The state is
                not changed then.
        """
        if found_inf:
            self._overflow()
        else:
            self._clean_step()

    def _overflow(self) -> None:
        falls = self._overflows + 1 >= self.hysteresis
        if falls and self.at_minimum and self.on_min_scale == "raise":
            raise LossScaleError(
                f"gradients overflow at the smallest loss scale, {self._scale:g} (min_scale={self.min_scale:g}): the "
                "loss diverges, or this model's values exceed what fp16 holds. bf16 has the range of fp32"
                f"{advice(Case.SMALLEST_SCALE, ': ')}; on_min_scale='continue' goes on skipping steps"
            )
        self._overflows += 1
        self._clean_steps = 0
        if falls:
            self._scale = max(self._scale * self.backoff_factor, self.min_scale)

    def _clean_step(self) -> None:
        self._clean_steps += 1
        if self.consecutive_hysteresis:
            self._overflows = 0
        # This is not "==" because a resumed run may have a smaller window than the run that saved the state.
        if self._clean_steps >= self.window:
            self._scale = min(self._scale * self.growth_factor, self.max_scale)
            self._clean_steps = 0
            self._overflows = 0

    @override
    def state_dict(self) -> dict[str, float]:
        return {"scale": self._scale, "clean_steps": self._clean_steps, "overflows": self._overflows}

    @override
    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from ``state``. A scale outside the configured bounds is moved to the nearest bound.

        Args:
            state: the result of :meth:`state_dict`. Values that are missing there stay as they are.

        Raises:
            ValueError: a value is not a number, or not in the range that it must have.
        """
        scale = state.get("scale", self._scale)
        _check("the saved scale", scale, "a finite number > 0", _is_number(scale) and 0 < scale < math.inf)
        counts = {}
        for name in ("clean_steps", "overflows"):
            counts[name] = state.get(name, getattr(self, f"_{name}"))
            valid = _is_number(counts[name]) and 0 <= counts[name] < math.inf
            _check(f"the saved {name}", counts[name], "a finite number >= 0", valid)
        self._scale = min(max(float(scale), self.min_scale), self.max_scale)
        self._clean_steps, self._overflows = int(counts["clean_steps"]), int(counts["overflows"])

    def __repr__(self) -> str:
        return (
            f"DynamicLossScaler(scale={self._scale:g}, window={self.window}, hysteresis={self.hysteresis}, "
            f"min_scale={self.min_scale:g})"
        )


_LARGEST_SCALE = 2.0**127  # the largest power of two in fp32


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def _check(name: str, value: object, expected: str, valid: bool) -> None:
    if not valid:
        raise ValueError(f"{name}={value!r} must be {expected}")
