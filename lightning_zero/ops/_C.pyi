"""Kernels on raw host addresses. They do not check memory; call `lightning_zero.ops` instead.

`threads` must be >= 1. Functions with an argument `isa` raise the errors of `resolve_isa`.
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
    """Addresses of arrays of `count` elements; 0 if there is no `remainder` or `copy_out`.

    `scales` are the addresses of the scales of int8 states, one scale per block; empty for other states.
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
    """The numbers that determine stochastic rounding; `index` is the index of the first element."""

    def __init__(self, *, seed: int, step: int, index: int) -> None: ...

def block_length() -> int:
    """The number of elements that share a scale in 8-bit state."""

def compiled_isas() -> list[str]:
    """Instruction sets in this binary, slowest first."""

def supported_isas() -> list[str]:
    """The instruction sets of `compiled_isas` that this CPU and operating system support."""

def resolve_isa(name: str) -> str:
    """`name` itself, or the fastest supported instruction set if it is empty.

    Raises:
        ValueError: the name is unknown, or the machine lacks the instruction set.
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
    """See `AdamCoefficients`."""

    grad_scale: float
    l2: float
    eps: float
    negative_lr: float
    def __init__(
        self, *, lr: float, lr_decay: float, eps: float, weight_decay: float, step: int, grad_scale: float
    ) -> None: ...

class LionCoefficients:
    """See `AdamCoefficients`."""

    grad_scale: float
    decay: float
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    negative_lr: float
    def __init__(self, *, lr: float, beta1: float, beta2: float, weight_decay: float, grad_scale: float) -> None: ...

class SgdCoefficients:
    """See `AdamCoefficients`."""

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
def add(*, isa: str, total: int, values: int, dtype: DType, count: int, threads: int) -> None: ...
def sum_parts(
    *,
    isa: str,
    total: int,
    total_dtype: DType,
    add: bool,
    parts: Sequence[int],
    factor: float,
    dtype: DType,
    count: int,
    threads: int,
) -> None: ...
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
        self, *, file: int, address: int, nbytes: int, offset: int, alignment: int, write: bool
    ) -> tuple[int, int] | None:
        """Transfer bytes between memory and a file.

        Args:
            file: descriptor of the file.
            address: of the memory.
            nbytes: number of bytes.
            offset: position in the file.
            alignment: address, bytes, offset and the pool's block must be multiples of it.
            write: write to the file; otherwise read.

        Returns:
            Errno and offset of the first failure; the errno is 0 if the file ends too early.

        Raises:
            RuntimeError: this process is the child of a fork.
        """

class DiskThreads(DiskPool):
    """Transfers by `depth` >= 1 threads in blocks of `block` > 0 bytes. Raises OSError if no thread can be made."""

    def __init__(self, *, depth: int, block: int) -> None: ...

class DiskRings(DiskPool):
    """Transfers by io_uring, `depth` >= 1 blocks of `block` > 0 bytes at a time in each call.

    Raises OSError if no ring can be made.
    """

    def __init__(self, *, depth: int, block: int) -> None: ...

def io_uring_refusal() -> str:
    """The reason why the system refuses io_uring; an empty string if it does not."""

class SharedMemory:
    """A buffer of `nbytes` bytes that processes share: new zeros, or those of an open `file`. Linux only.

    Raises OSError.
    """

    file: int  # -1 if it is closed
    def __init__(self, nbytes: int, file: int | None = None) -> None: ...
    def close_file(self) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

def announce(signal: int, value: int) -> bool: ...
def wait_for(signal: int, value: int, seconds: float) -> bool: ...
def sleep_for(signal: int, value: int) -> bool: ...
def read_memory(process: int, address: int, target: int, nbytes: int) -> int:
    """Returns 0, or the system's error number."""

def read_table(process: int, table: int, count: int, nbytes: int, pieces: int) -> int:
    """Returns 0, or the system's error number; EINVAL for a wrong table."""

def read_pieces(process: int, pieces: int, count: int, start: int, target: int, nbytes: int) -> int:
    """Returns 0, or the system's error number."""
