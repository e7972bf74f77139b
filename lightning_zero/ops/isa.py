"""The instruction set that the kernels use, chosen once per process."""

from __future__ import annotations

import os

from lightning_zero.ops import _C

_ISA = _C.resolve_isa(os.environ.get("LIGHTNING_ZERO_ISA", ""))


def isa() -> str:
    """Returns the instruction set that the kernels use: `LIGHTNING_ZERO_ISA`, or the fastest supported one."""
    return _ISA


def compiled_isas() -> tuple[str, ...]:
    """Lists the instruction sets in this binary, slowest first."""
    return tuple(_C.compiled_isas())


def supported_isas() -> tuple[str, ...]:
    """Lists the instruction sets of `compiled_isas` that this CPU and operating system support."""
    return tuple(_C.supported_isas())
