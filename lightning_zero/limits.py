"""Memory that this process may take: the machine's, and what limits of the process allow; and which machine it is.

Facts are read from `/proc`, which lies under a `root`; None where a system does not tell.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from lightning_zero.cgroups import Unlimited, read_text


def machine_memory(root: Path = Path("/")) -> dict[str, int]:
    """Reads the lines of `/proc/meminfo`, in bytes, such as `MemTotal` and `SwapTotal`."""
    return _kilobytes(root / "proc/meminfo")


def process_memory(root: Path = Path("/")) -> dict[str, int]:
    """Reads the sizes of this process in bytes, such as `VmSize` and `RssAnon`."""
    return _kilobytes(root / "proc/self/status")


def _kilobytes(path: Path) -> dict[str, int]:
    lines = re.findall(r"^(\w+):\s+(\d+) kB$", read_text(path) or "", re.MULTILINE)
    return {name: int(kilobytes) * 1024 for name, kilobytes in lines}


def physical_memory() -> int | None:
    """Asks the C library for the machine's memory, in bytes, where there is no `/proc`."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # no such function, or no such name
        return None


def locked_memory() -> int | Unlimited | None:
    """Reads how many bytes this process may lock (RLIMIT_MEMLOCK, the soft limit)."""
    return _limit("RLIMIT_MEMLOCK")


def address_space() -> int | Unlimited | None:
    """Reads how many bytes this process may map (RLIMIT_AS, the soft limit)."""
    return _limit("RLIMIT_AS")


def data_size() -> int | Unlimited | None:
    """Reads how many bytes this process may map for its own data, to be written (RLIMIT_DATA, the soft limit)."""
    return _limit("RLIMIT_DATA")


def _limit(name: str) -> int | Unlimited | None:
    try:
        import resource
    except ImportError:  # not a Unix
        return None
    soft, _ = resource.getrlimit(getattr(resource, name))
    return "unlimited" if soft == resource.RLIM_INFINITY else soft


def shared_memory(root: Path = Path("/")) -> int | None:
    """Reads the size of `/dev/shm`, through which NCCL and the workers of a DataLoader pass data."""
    try:
        return shutil.disk_usage(root / "dev/shm").total
    except OSError:
        return None


def boot(root: Path = Path("/")) -> str:
    """Reads what tells this machine, as it was started last, from all others; "" where nothing does."""
    return (read_text(root / "proc/sys/kernel/random/boot_id") or "").strip()


def process_name(root: Path = Path("/")) -> str:
    """Names this process for others of its machine, see :func:`has_ended`."""
    try:
        space = str((root / "proc/self/ns/pid").readlink())
    except OSError:  # not Linux
        space = ""
    return f"{boot(root)} {space} {os.getpid()}"


def has_ended(process: str, root: Path = Path("/")) -> bool:
    """Tells whether a process has ended, by its :func:`process_name`; False where it cannot be seen from here."""
    place, _, number = process.rpartition(" ")
    own, _, _ = process_name(root).rpartition(" ")
    if place != own or not all(place.split(" ")):
        return False
    _, _, state = (read_text(root / "proc" / number / "stat") or ") Z").rpartition(") ")
    return state[0] in "ZX"  # it is there until its parent has asked for its exit code


def processor(root: Path = Path("/")) -> str | None:
    """Reads the model of the processors."""
    model = re.search(r"^model name\s*:\s*(.+)$", read_text(root / "proc/cpuinfo") or "", re.MULTILINE)
    return model[1].strip() if model else None
