"""Optimizer kernels on host memory, with the instruction set chosen at run time.

The kernels work on flat tensors in place, with the GIL released. Large arrays are divided among threads of the
package's own, which sleep between calls and do not disturb torch's threads. Every instruction set and every number of
threads gives the same bits, except for NaN payloads. Environment variables (empty means unset): `LIGHTNING_ZERO_ISA`
(`scalar`, `avx2`, `avx512`) overrides the instruction set, `LIGHTNING_ZERO_NUM_THREADS` the number of threads, and
`LIGHTNING_ZERO_CORES` (`0-3,8`) binds the threads to cores.
"""

from __future__ import annotations

try:
    from lightning_zero.ops import _C  # noqa: F401 - imported first, for the message below
except ImportError as error:
    raise ImportError(
        f"the compiled extension lightning_zero.ops._C could not be imported from {__path__}; "
        "expected it beside this module. Install the package (`pip install .`), and do not let a source "
        "folder on sys.path hide the installed one."
    ) from error

from lightning_zero.ops.arguments import runs_on
from lightning_zero.ops.arrays import (
    SQUARES_PIECE,
    SQUARES_ROW,
    RunningSquares,
    accumulate_,
    add_,
    join_,
    split_,
    sum_,
    sum_in_order_,
    sum_of_squares,
    sum_of_squares_in_pieces,
    sums_in_place,
    zero_,
)
from lightning_zero.ops.blocks import BLOCK, Quantized, count_blocks, dequantize_, quantize_
from lightning_zero.ops.disk import DiskBackend, DiskPool, TransferFailure, io_uring_refusal
from lightning_zero.ops.formulas import Updates, updates_on
from lightning_zero.ops.isa import compiled_isas, isa, supported_isas
from lightning_zero.ops.processes import (
    SIGNAL_BYTES,
    RemoteMessage,
    SharedMemory,
    Signal,
    cma_refusal,
    read_memory,
)
from lightning_zero.ops.threads import (
    bind_threads,
    get_num_threads,
    keep_near,
    set_num_threads,
    share_cores,
    threads_beside,
    work_beside,
)
from lightning_zero.ops.updates import Options, Ties, adagrad_, adamw_, lion_, sgd_

__all__ = [
    "BLOCK",
    "SIGNAL_BYTES",
    "SQUARES_PIECE",
    "SQUARES_ROW",
    "DiskBackend",
    "DiskPool",
    "Options",
    "Quantized",
    "RemoteMessage",
    "RunningSquares",
    "SharedMemory",
    "Signal",
    "Ties",
    "TransferFailure",
    "Updates",
    "accumulate_",
    "adagrad_",
    "adamw_",
    "add_",
    "bind_threads",
    "cma_refusal",
    "compiled_isas",
    "count_blocks",
    "dequantize_",
    "get_num_threads",
    "io_uring_refusal",
    "isa",
    "join_",
    "keep_near",
    "lion_",
    "quantize_",
    "read_memory",
    "runs_on",
    "set_num_threads",
    "sgd_",
    "share_cores",
    "split_",
    "sum_",
    "sum_in_order_",
    "sum_of_squares",
    "sum_of_squares_in_pieces",
    "sums_in_place",
    "supported_isas",
    "threads_beside",
    "updates_on",
    "work_beside",
    "zero_",
]
