"""STREAM for optimizers: the time that memory alone takes to read and write the arrays of a step.

It gives an upper bound for the speed of a step, measured on the step's own arrays; see `benchmarks/stream.c`. It is
compiled for the current machine when the benchmark starts, and uses threads of its own.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, get_args

from torch import Tensor

Layout = Literal["fp32", "fp32_copy", "split", "fp32_copy_half", "split_half", "split_byte"]

LAYOUTS: tuple[Layout, ...] = get_args(Layout)  # the order in stream.c
BLOCK = 32  # lengths must be multiples of this number of elements
_CHUNK = 1 << 18
_SOURCE = Path(__file__).with_name("stream.c")
_FLAGS = "-O3 -march=native -shared -fPIC".split()


class _Arrays(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("param", "second", "exp_avg", "exp_avg_sq", "grad")] + [
        ("mask", ctypes.c_uint32)
    ]


class Stream:
    """Reads and writes the arrays of a layout in one pass.

    Args:
        compiler: a C compiler that understands GCC's options.

    Raises:
        FileNotFoundError: there is no such compiler.
        subprocess.CalledProcessError: it cannot compile the source.
    """

    def __init__(self, compiler: str = "cc") -> None:
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "stream.so"
            subprocess.run([compiler, *_FLAGS, "-o", library, _SOURCE], check=True, capture_output=True, text=True)
            self._stream = ctypes.CDLL(str(library)).stream  # a CDLL's functions run without Python's lock
        size = ctypes.c_size_t
        self._stream.argtypes = [ctypes.c_int, ctypes.c_void_p, size, size, ctypes.c_void_p, size, size]
        self._stream.restype = None
        version = subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True).stdout
        self.compiler = f"{version.splitlines()[0]} {' '.join(_FLAGS)}"
        self._pool = ThreadPoolExecutor(max_workers=64)  # threads are started when they are needed, and kept

    def run(
        self,
        layout: Layout,
        *,
        param: Tensor,
        second: Tensor | None,
        states: Sequence[Tensor],
        grad: Tensor,
        threads: int,
        mask: int = 0,
    ) -> None:
        """Make one pass over the arrays.

        Args:
            layout: widths of the arrays, and whether `second` is only written ("copy") or read and written ("split").
            param: [n], where n is a multiple of 32, at an address that is a multiple of 64.
            second: [n], the 16-bit copy, which receives the high half of `param`, or the remainder.
            states: two tensors, [n].
            grad: [n]
            threads: number of threads that share the arrays.
            mask: selects the bits of the gradient that are added; 0 leaves all bytes except those of a copy unchanged.

        Raises:
            ValueError: a length or an address is not such a multiple.
        """
        addresses = [0 if array is None else array.data_ptr() for array in (param, second, *states, grad)]
        if param.numel() % BLOCK or any(address % 64 for address in addresses):
            raise ValueError(f"{param.numel()} elements at {addresses}; expected multiples of {BLOCK} and of 64")
        arrays = _Arrays(*addresses, mask)
        counters = (ctypes.c_size_t * threads)()
        job = (LAYOUTS.index(layout), ctypes.addressof(arrays), param.numel(), _CHUNK, ctypes.addressof(counters))
        others = [self._pool.submit(self._stream, *job, thread, threads) for thread in range(1, threads)]
        self._stream(*job, 0, threads)
        for other in others:
            other.result()
