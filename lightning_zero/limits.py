"""Reads how much memory this process may use, by the machine and by limits of the process, and identifies the machine.

Facts are read from `proc` below a folder `root`, normally `/`. Functions return None if the system does not provide a
fact.
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


def divided_memory(root: Path = Path("/")) -> dict[str, int]:
    """Reads sizes of this process in bytes, such as `Pss_Anon`: a page that n processes share counts as 1/n of it."""
    return _kilobytes(root / "proc/self/smaps_rollup")


def _kilobytes(path: Path) -> dict[str, int]:
    lines = re.findall(r"^(\w+):\s+(\d+) kB$", read_text(path) or "", re.MULTILINE)
    return {name: int(kilobytes) * 1024 for name, kilobytes in lines}


def physical_memory() -> int | None:
    """Asks the C library for the machine's memory in bytes, for systems without `/proc`."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # the function or the name does not exist
        return None


def locked_memory() -> int | Unlimited | None:
    """Reads how many bytes this process may lock (RLIMIT_MEMLOCK, the soft limit)."""
    return _limit("RLIMIT_MEMLOCK")


def address_space() -> int | Unlimited | None:
    """Reads how many bytes this process may map (RLIMIT_AS, the soft limit)."""
    return _limit("RLIMIT_AS")


def data_size() -> int | Unlimited | None:
    """Reads how many bytes of writable private data this process may map (RLIMIT_DATA, the soft limit)."""
    return _limit("RLIMIT_DATA")


def _limit(name: str) -> int | Unlimited | None:
    try:
        import resource
    except ImportError:  # not a Unix
        return None
    soft, _ = resource.getrlimit(getattr(resource, name))
    return "unlimited" if soft == resource.RLIM_INFINITY else soft


def shared_memory(root: Path = Path("/")) -> int | None:
    """Reads the size in bytes of `/dev/shm`, by which NCCL and the workers of a DataLoader exchange data."""
    try:
        return shutil.disk_usage(root / "dev/shm").total
    except OSError:
        return None


def boot(root: Path = Path("/")) -> str:
    """Reads an identifier of this machine since its last start; "" if there is none."""
    return (read_text(root / "proc/sys/kernel/random/boot_id") or "").strip()


def process_name(root: Path = Path("/")) -> str:
    """Returns a name of this process by which others on the machine can call :func:`process_number`."""
    try:
        space = str((root / "proc/self/ns/pid").readlink())
    except OSError:  # not Linux
        space = ""
    return f"{boot(root)} {space} {os.getpid()}"


def process_number(process: str, root: Path = Path("/")) -> int | None:
    """Returns the number of the process with this :func:`process_name`; ``None`` if this process cannot see it."""
    place, _, number = process.rpartition(" ")
    own, _, _ = process_name(root).rpartition(" ")
    return int(number) if place == own and all(place.split(" ")) else None


def has_ended(process: str, root: Path = Path("/")) -> bool:
    """Whether the process with this :func:`process_name` has ended; False if it is not visible to this process."""
    if (number := process_number(process, root)) is None:
        return False
    _, _, state = (read_text(root / "proc" / str(number) / "stat") or ") Z").rpartition(") ")
    return state[0] in "ZX"  # an ended process stays listed until its parent has asked for the exit code


def processor(root: Path = Path("/")) -> str | None:
    """Reads the model name of the processors."""
    model = re.search(r"^model name\s*:\s*(.+)$", read_text(root / "proc/cpuinfo") or "", re.MULTILINE)
    return model[1].strip() if model else None
