"""Sizes and rates of known GPUs, as their vendors state them, and of machines without measured rates.

No run reaches the rates that a vendor states, so a time computed from them is a lower bound. Matrix rates are dense,
without sparsity, with sums in fp32. Rates of links are per direction.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass

_GB, _TERA = 10**9, 10**12
_UNITS = {"": 1} | {prefix: 1000**n for n, prefix in enumerate("KMGT", start=1)}
_UNITS |= {f"{prefix}I": 1024**n for n, prefix in enumerate("KMGT", start=1)}
_NUMBER = r"([0-9.]+(?:e[0-9]+)?)"
_LEAST_GPU = 2**28  # bytes; with less not even the runtime of a device starts
# Fraction of a GPU's memory that can be used; the rest is for CUDA's context, NCCL's buffers and fragmentation.
USABLE = 0.95


@dataclass(frozen=True)
class Gpu:
    """A type of GPU.

    Attributes:
        name: as users type it.
        memory: bytes.
        matmul_16: operations per second of matrix products in bf16 or fp16.
        matmul_32: the same in fp32, as torch computes it by default (no TF32).
        bandwidth: bytes per second of its memory.
        link: bytes per second that a GPU sends to others of its machine.
        pcie: bytes per second to or from host memory.
        source: of these numbers.
        shares_host: whether its memory is the host's.
    """

    name: str
    memory: int
    matmul_16: float
    matmul_32: float
    bandwidth: float
    link: float
    pcie: float
    source: str
    shares_host: bool = False


def _gpu(
    name: str, gib: float, tera_16: float, tera_32: float, memory_gb: float, link_gb: float, pcie_gb: float, source: str
) -> Gpu:
    """Memory in GiB, operations in 10^12 per second, bandwidths in GB/s."""
    gb = float(_GB)
    tera = float(_TERA)
    sizes = int(gib * 2**30), tera_16 * tera, tera_32 * tera, memory_gb * gb, link_gb * gb, pcie_gb * gb
    return Gpu(name, *sizes, source)


# Sorted by memory, then by speed, the slowest first. Each was compared on 2026-11-24 with the named pages, which state
# or cite the vendor's numbers. Numbers stated with sparsity, or for both directions of a link, are halved.
_T4 = "sysrqmts.com/en/gpus/nvidia/tesla/t4"
_V100 = "Dell EMC Ready Solutions for AI, reference guide, page 17; matrix rates: V100 article of grokipedia"
_RTX_3090 = "cpu-gpu.alldbin.com, digitaltrends.com; 16-bit rate, twice that of fp32: not verified"
_L4 = "fpsbench.com, store.sourcecode.com; 16-bit rate: grokipedia.com/page/NVIDIA_L4_vs_L40S"
_A10 = "sysrqmts.com, baseten.co; 16-bit rate, of NVIDIA's data sheet: not verified"
_RTX_4090 = "waredb.com/processor/nvidia-geforce-rtx-4090, hmc-tech.com"
_RTX_5090 = "spheron.network/blog/nvidia-rtx-5090-specs; 16-bit rate: a quarter of that with sparsity and sums in fp16"
_A100 = "glennklockwood.com/garden/processors/A100, which cites NVIDIA's data sheet, SXM"
_L40S = "mullet.se/product.html?product_id=355414, the table of NVIDIA's data sheet"
_H100 = "archive-lib.hpctech.co.jp/gpuproduct/nvidia-h100.html, glennklockwood.com/garden/processors/h100, SXM"
_H200 = "aiwiki.ai/wiki/nvidia_h200, morphllm.com/nvidia-h200, SXM; memory as its driver reports it"
GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("t4", 16, 65, 8.1, 320, 16, 16, _T4),
        _gpu("v100-16", 16, 125, 15.7, 900, 150, 16, _V100),
        _gpu("3090", 24, 71, 35.6, 936, 32, 32, _RTX_3090),
        _gpu("l4", 24, 121, 30.3, 300, 32, 32, _L4),
        _gpu("a10", 24, 125, 31.2, 600, 32, 32, _A10),
        _gpu("4090", 24, 165.2, 82.6, 1008, 32, 32, _RTX_4090),
        _gpu("v100-32", 32, 125, 15.7, 900, 150, 16, _V100),
        _gpu("5090", 32, 209.5, 104.8, 1792, 64, 64, _RTX_5090),
        _gpu("a100-40", 40, 312, 19.5, 1555, 300, 32, _A100),
        _gpu("l40s", 48, 362, 91.6, 864, 32, 32, _L40S),
        _gpu("a100-80", 80, 312, 19.5, 2039, 300, 32, _A100),
        _gpu("h100", 80, 989, 67, 3350, 450, 64, _H100),
        _gpu("h200", 140, 989, 67, 4800, 450, 64, _H200),
    )
}
_OTHER_NAMES = {"a100": "a100-80", "v100": "v100-32", "h100-80": "h100"}


# Where nobody measured: three quarters of two channels of DDR5-4800, a network of 100 Gbit/s, and what drives with four
# lanes of PCIe 3 keep up when they are read and written in turn.
DRAM = 57.6 * _GB
NETWORK = 12.5 * _GB
DISK = 2.0 * _GB


@dataclass(frozen=True)
class Machine:
    """Machines of one kind, each with some GPUs.

    Attributes:
        gpu: of which each machine has ``gpus``.
        gpus: ranks of a machine.
        nodes: machines.
        host: bytes of memory of a machine that training may take.
        dram: bytes per second of a machine's memory, read and written together.
        network: bytes per second that a machine sends to others.
        disk: bytes per second that a machine reads from its disk and writes to it, together.
        storage: bytes of this disk that training may take.
    """

    gpu: Gpu
    gpus: int
    nodes: int
    host: int
    dram: float
    network: float
    disk: float = DISK
    storage: int = 0

    @property
    def world_size(self) -> int:
        """Ranks of all machines."""
        return self.gpus * self.nodes


def parse_size(text: str, least: int = 1) -> int:
    """Reads a number of bytes: "24GB" is 24 * 10^9, "24GiB" 24 * 2^30.

    Args:
        text: as above.
        least: bytes; fewer are a mistake, such as a unit that was forgotten.

    Raises:
        ValueError: for anything else.
    """
    match = re.fullmatch(_NUMBER + r"\s*([KMGT]?i?)B?", text.strip(), re.IGNORECASE)
    nbytes = None if match is None else _scaled(match[1], _UNITS.get(match[2].upper()))
    if nbytes is None:
        raise ValueError(f"{text!r} is not a size; expected a number with a unit, such as 128GB or 24GiB")
    if nbytes < least:
        raise ValueError(f"{text!r} is {nbytes} bytes; expected at least {least}: give a unit, such as 128GB or 24GiB")
    return nbytes


def _scaled(number: str, unit: int | None) -> int | None:
    """A number of units; ``None`` where it is none, or is too large."""
    try:
        value = float(number) * (unit or math.nan)
    except ValueError:
        return None
    return int(value) if math.isfinite(value) else None


def parse_gpu(text: str) -> Gpu:
    """Finds a GPU by its name, such as "a100" or "RTX 4090", or one with so much memory.

    One that is known by its memory alone, such as "24GB", has the rates of the first in the table that has as much.
    Memory of GPUs is sold in GB and counted in GiB: here both are GiB.

    Raises:
        ValueError: for a name that is none, and for a size that none has.
    """
    name = re.sub(r"^((nvidia|geforce|rtx|tesla)[\s-]*)+", "", text.strip().lower())
    name = _OTHER_NAMES.get(name, name)
    if name in GPUS:
        return GPUS[name]
    match = re.fullmatch(_NUMBER + r"\s*([mgt])i?b", name)
    memory = None if match is None else _scaled(match[1], 1024 ** (2 + "mgt".index(match[2])))
    if memory is not None:
        if memory < _LEAST_GPU:
            raise ValueError(f"{text!r} is too little memory for a GPU; expected a size such as 24GB")
        for gpu in GPUS.values():
            if gpu.memory >= memory:
                return dataclasses.replace(gpu, name=text.strip(), memory=memory, source=f"rates of {gpu.name}")
        largest = max(gpu.memory for gpu in GPUS.values()) >> 30
        raise ValueError(f"{text!r} is more memory than a known GPU has; expected at most {largest}GB")
    raise ValueError(f"{text!r} is no known GPU; expected a size such as 24GB, or one of {', '.join(GPUS)}")
