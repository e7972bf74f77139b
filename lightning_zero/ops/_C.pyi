"""Kernels on raw host addresses. They check nothing about the memory: call `lightning_zero.ops` instead.

`threads` >= 1 everywhere. A function with an `isa` raises as `resolve_isa`.
"""

from collections.abc import Sequence
from enum import Enum

class DType(Enum):
    float32 = 0
    bfloat16 = 1
    float16 = 2
    int8 = 3

class Ties(Enum):
    even = 0
    away = 1

class UpdateArrays:
    """Addresses of `count` elements each; 0 where there is no `remainder` or `copy_out`.

    `scales` are those of int8 states, one for each block, and else empty.
    """

    def __init__(
        self,
        *,
        count: int,
        param: int,
        param_dtype: DType,
        remainder: int,
        copy_out: int,
        copy_dtype: DType,
        copy_ties: Ties,
        grad: int,
        grad_dtype: DType,
        states: Sequence[int],
        state_dtype: DType,
        scales: Sequence[int],
    ) -> None: ...

class RoundingKey:
    """What stochastic rounding depends on; `index` is that of the first element."""

    def __init__(self, *, seed: int, step: int, index: int) -> None: ...

def block_length() -> int:
    """Elements that share a scale in state of 8 bits."""

def compiled_isas() -> list[str]:
    """Instruction sets in this binary, slowest first."""

def supported_isas() -> list[str]:
    """Those of `compiled_isas` that this CPU and operating system run."""

def resolve_isa(name: str) -> str:
    """`name` itself, or the fastest supported instruction set if it is empty.

    Raises:
        ValueError: the name is unknown or the machine lacks the instruction set.
    """

class AdamCoefficients:
    """The scalars of one update, rounded to fp32; see cpp/include/lightning_zero/update.h."""

    grad_scale: float
    l2: float
    decay: float
    lerp_weight: float
    lerp_from_gradient: bool
    beta2: float
    one_minus_beta2: float
    eps: float
    negative_step_size: float
    def __init__(
        self,
        *,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        step: int,
        grad_scale: float,
        decoupled: bool,
        amsgrad: bool,
    ) -> None: ...

class AdagradCoefficients:
    """As `AdamCoefficients`."""

    grad_scale: float
    l2: float
    eps: float
    negative_lr: float
    def __init__(
        self, *, lr: float, lr_decay: float, eps: float, weight_decay: float, step: int, grad_scale: float
    ) -> None: ...

class LionCoefficients:
    """As `AdamCoefficients`."""

    grad_scale: float
    decay: float
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    negative_lr: float
    def __init__(self, *, lr: float, beta1: float, beta2: float, weight_decay: float, grad_scale: float) -> None: ...

class SgdCoefficients:
    """As `AdamCoefficients`."""

    grad_scale: float
    l2: float
    momentum: float
    one_minus_dampening: float
    negative_lr: float
    nesterov: bool
    first: bool
    def __init__(
        self,
        *,
        lr: float,
        momentum: float,
        dampening: float,
        nesterov: bool,
        weight_decay: float,
        first: bool,
        grad_scale: float,
    ) -> None: ...

def adam(
    *,
    isa: str,
    arrays: UpdateArrays,
    key: RoundingKey,
    threads: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float,
    decoupled: bool,
    amsgrad: bool,
) -> None: ...
def adagrad(
    *,
    isa: str,
    arrays: UpdateArrays,
    key: RoundingKey,
    threads: int,
    lr: float,
    lr_decay: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float,
) -> None: ...
def lion(
    *,
    isa: str,
    arrays: UpdateArrays,
    key: RoundingKey,
    threads: int,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    grad_scale: float,
) -> None: ...
def sgd(
    *,
    isa: str,
    arrays: UpdateArrays,
    key: RoundingKey,
    threads: int,
    lr: float,
    momentum: float,
    dampening: float,
    nesterov: bool,
    weight_decay: float,
    first: bool,
    grad_scale: float,
) -> None: ...
def sum_of_squares(*, isa: str, values: int, dtype: DType, count: int, threads: int) -> float: ...
def split(*, isa: str, whole: int, high: int, dtype: DType, remainder: int, count: int, threads: int) -> None: ...
def join(*, isa: str, whole: int, high: int, dtype: DType, remainder: int, count: int, threads: int) -> None: ...
def quantize(
    *, isa: str, whole: int, codes: int, scales: int, is_signed: bool, lead: int, count: int, threads: int
) -> None: ...
def dequantize(
    *, isa: str, whole: int, codes: int, scales: int, is_signed: bool, lead: int, count: int, threads: int
) -> None: ...
def fill_with_zeros(*, memory: int, nbytes: int, threads: int) -> None: ...
def bind_threads(cores: Sequence[int], together: bool) -> None:
    """Raises ValueError for a core that this process may not run on."""

class DiskPool:
    """Reads and writes blocks of files: `DiskThreads` or `DiskRings`."""

    def transfer(
        self, transfers: Sequence[tuple[int, int, int, int]], *, alignment: int, write: bool
    ) -> tuple[int, int, int] | None:
        """Transfer between memory and files.

        Args:
            transfers: file descriptor, address, bytes and offset of each.
            alignment: divides addresses, bytes, offsets and the pool's block.
            write: to the files, rather than from them.

        Returns:
            Errno, file and offset of the first failure; the errno is 0 where a file ends too early.

        Raises:
            RuntimeError: in the child of a fork.
        """

class DiskThreads(DiskPool):
    """By threads; `depth` >= 1 of them, `block` > 0 bytes. Raises OSError without a thread."""

    def __init__(self, *, depth: int, block: int) -> None: ...

class DiskRings(DiskPool):
    """By io_uring; `depth` >= 1 blocks at a time in each call, `block` > 0 bytes. Raises OSError without a ring."""

    def __init__(self, *, depth: int, block: int) -> None: ...

def io_uring_refusal() -> str:
    """Why the system refuses io_uring; empty where it does not."""
