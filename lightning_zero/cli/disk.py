"""The disk of `lightning-zero doctor --nvme PATH`: how fast the engine reads and writes files there.

It moves tiles in the same way as a training: with the tile size of a buffer of 0.25 GiB, in blocks by io_uring or by
threads as a training would choose, with O_DIRECT if the file system allows it, over a file that was written before.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_zero.cli.text import size

if TYPE_CHECKING:
    from lightning_zero.storage.disk_speed import DiskSpeed

_BUFFER_BYTES = 1 << 28  # the default of nvme_buffer_gb
_SECONDS = 1.0  # of each measurement
# Bytes of a parameter that rest on the disk, and those of them that a step of one micro-batch reads and writes.
_RESTING = {
    "AdamW": (12, 12, 12),  # masters and moments of fp32
    "AdamW, gradients on the disk": (16, 16, 16),  # of fp32: written in backward, read by the update
    # Of 16 bits, at stage 3: read by forward and by backward, written by the update.
    "AdamW, parameters on the disk": (14, 12 + 2 * 2, 14),
    "split CPUAdamW": (8, 8, 8),  # of parameters that rest at 16 bits on a GPU; moments of bf16
}


@dataclass(frozen=True, slots=True)
class StepTime:
    """The share of the disk in the time of a step.

    Attributes:
        optimizer: the optimizer whose state rests on the disk.
        resting_bytes: bytes of the state of all ranks that share the disk.
        seconds: time in which a step of one micro-batch reads and writes it.
    """

    optimizer: str
    resting_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Disk:
    """A disk, as the engine uses it.

    Attributes:
        path: a folder on the disk.
        file_system: type of the file system; empty if unknown.
        in_memory: whether its files are in host memory.
        on_network: whether its files are on another machine.
        free_bytes: free space for files.
        backend: the backend that moves blocks, "io_uring" or "threads".
        backend_reason: why this backend was chosen.
        direct: whether transfers bypass the page cache.
        reason: why they do or do not.
        depth: number of blocks in flight.
        block_bytes: size of a block.
        tile_bytes: size of a transfer.
        read_bytes_per_second: rate of reading one tile after the other.
        write_bytes_per_second: rate of writing one tile after the other.
        mixed_bytes_per_second: rate of tiles that are read and written at the same time; both count.
        params: number of parameters of the model in question.
        steps: times of its steps.
    """

    path: str
    file_system: str
    in_memory: bool
    on_network: bool
    free_bytes: int
    backend: str
    backend_reason: str
    direct: bool
    reason: str
    depth: int
    block_bytes: int
    tile_bytes: int
    read_bytes_per_second: float
    write_bytes_per_second: float
    mixed_bytes_per_second: float
    params: int | None
    steps: list[StepTime]


def measure_disk(path: Path, params: float | None = None, seconds: float = _SECONDS) -> Disk:
    """Measures the disk at a path, where it leaves nothing behind.

    Args:
        path: a folder on the disk.
        params: number of parameters of a model whose state would rest there.
        seconds: duration of each of the five steps of the measurement.

    Raises:
        OSError: the path cannot be written to, or the disk fails; see `lightning_zero.storage.DiskError`.
    """
    from lightning_zero.storage.disk_file import DiskFile
    from lightning_zero.storage.disk_speed import choose_way, measure, usual_way
    from lightning_zero.storage.nvme import transfer_bytes
    from lightning_zero.storage.run_folder import RunFolder, file_system

    folder, tile = RunFolder(path, f"doctor-{secrets.token_hex(4)}", 0), transfer_bytes(_BUFFER_BYTES)
    try:
        system, free = file_system(path), os.statvfs(path)
        free_bytes = free.f_bavail * free.f_frsize
        file = DiskFile(folder.path / "measured.bin", usual_way().pool())
        way = choose_way(file, tile, max(tile, free_bytes // 4), seconds)
        speed = measure(file, tile, seconds, max(tile, free_bytes // 4))
    finally:
        folder.remove()
    return Disk(
        path=str(path),
        file_system=system.kind,
        in_memory=system.in_memory,
        on_network=system.on_network,
        free_bytes=free_bytes,
        backend=file.pool.backend,
        backend_reason=_backend_reason(file.pool.backend),
        direct=file.direct,
        reason=_reason(file.direct, file.refusal),
        depth=way.depth,
        block_bytes=way.block,
        tile_bytes=tile,
        read_bytes_per_second=speed.read,
        write_bytes_per_second=speed.write,
        mixed_bytes_per_second=speed.mixed,
        params=None if params is None else int(params),
        steps=[] if params is None else list(_steps(int(params), speed)),
    )


def _reason(direct: bool, refusal: str) -> str:
    if direct:
        return "the file system takes O_DIRECT"
    return f"the file system refuses O_DIRECT ({refusal})" if refusal else "the system has no O_DIRECT"


def _backend_reason(backend: str) -> str:
    from lightning_zero import ops

    if refusal := ops.io_uring_refusal():
        return f"there is no io_uring ({refusal})"
    if backend == "io_uring":
        return "the kernel allows it, and it was faster than threads"
    return "they were faster than io_uring"


def _steps(params: int, speed: DiskSpeed) -> Iterator[StepTime]:
    for optimizer, (resting, read, written) in _RESTING.items():
        yield StepTime(optimizer, params * resting, speed.seconds(params * read, params * written))


def judge_disk(disk: Disk) -> Iterator[tuple[str, str]]:
    """Yields warnings, with remedies, about a disk that is unsuitable for state."""
    if disk.in_memory:
        yield (
            f"{disk.path} is on {disk.file_system}: state would take host memory there",
            "Choose a folder on a local disk, or keep state in host memory: zero2_offload.",
        )
    elif disk.on_network:
        yield f"{disk.path} is on {disk.file_system}, over a network", "Choose a folder on a local disk of each node."
    elif not disk.direct:
        yield (
            f"{disk.reason}: transfers go through the page cache",
            "Choose a folder on ext4 or XFS on a local disk.",
        )
    for step in disk.steps[:1]:
        if step.resting_bytes > disk.free_bytes:
            yield (
                f"state takes {size(step.resting_bytes)}, {disk.path} has {size(disk.free_bytes)} free",
                "Free some of it, use disks of more nodes, or choose another one.",
            )


def describe_disk(disk: Disk) -> dict[str, str]:
    """The facts as text, by their names."""
    rates = {
        "read": disk.read_bytes_per_second,
        "write": disk.write_bytes_per_second,
        "mixed": disk.mixed_bytes_per_second,
    }
    return {
        "path": f"{disk.path}, on {disk.file_system or 'an unknown file system'}, {size(disk.free_bytes)} free",
        "backend": f"{disk.backend}: {disk.backend_reason}",
        "page cache": f"{'passed by' if disk.direct else 'used'}: {disk.reason}",
        "transfers": f"{size(disk.tile_bytes)} in blocks of {size(disk.block_bytes)}, {disk.depth} at a time",
        **{name: f"{rate / 1e9:.3g} GB/s" for name, rate in rates.items()},
        **{
            f"a step with {step.optimizer}": f"at least {step.seconds:.3g} s for {disk.params:,} parameters, of which "
            f"{size(step.resting_bytes)} rest on the disk"
            for step in disk.steps
        },
    }
