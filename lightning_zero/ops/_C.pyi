"""Kernels on raw host addresses. They check nothing about the memory: call `lightning_zero.ops` instead."""

from enum import Enum

class DType(Enum):
    float32 = 0
    bfloat16 = 1
    float16 = 2

def compiled_isas() -> list[str]:
    """Instruction sets in this binary, slowest first."""

def supported_isas() -> list[str]:
    """Those of `compiled_isas` that this CPU and operating system run."""

def resolve_isa(name: str) -> str:
    """`name` itself, or the fastest supported instruction set if it is empty.

    Raises:
        ValueError: the name is unknown or the machine lacks the instruction set.
    """

def adamw(
    *,
    isa: str,
    param: int,
    exp_avg: int,
    exp_avg_sq: int,
    grad: int,
    grad_dtype: DType,
    copy_out: int,
    copy_dtype: DType,
    count: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float,
    decoupled: bool,
    threads: int,
) -> None:
    """Update `count` elements in place at these addresses; `copy_out=0` means no 16-bit copy; `threads` >= 1.

    Raises:
        ValueError: as `resolve_isa`.
    """
