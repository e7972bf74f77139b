"""Reads the limits of this process's control groups (those of a container), in both versions of the interface.

They are read from `proc` and `sys` below a folder `root`, normally `/`. Functions return None if the system has no
control groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, TypeVar

Unlimited = Literal["unlimited"]
_Number = TypeVar("_Number", int, float)

_NO_LIMIT = 1 << 60  # bytes; version 1 reports the largest multiple of a page, which is larger, if there is no limit


def read_text(path: Path) -> str | None:
    """Reads the text of a small file; None if it does not exist or cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def cpu_quota(root: Path = Path("/")) -> float | Unlimited | None:
    """Reads how much CPU time, in cores, the control groups of this process allow: the minimum of all levels."""

    def quota(folder: Path) -> float | Unlimited | None:
        unified = read_text(folder / "cpu.max")
        if unified is not None:
            allowed, _, period = unified.strip().partition(" ")
        else:
            allowed = (read_text(folder / "cpu.cfs_quota_us") or "").strip()
            period = (read_text(folder / "cpu.cfs_period_us") or "").strip()
        if allowed in {"max", "-1"}:
            return "unlimited"
        if not allowed.isdecimal() or not period.isdecimal() or int(period) == 0:
            return None
        return int(allowed) / int(period)

    return _smallest(root, "cpu", quota)


def memory_limit(root: Path = Path("/")) -> int | Unlimited | None:
    """Reads how many bytes of memory the control groups of this process allow: the minimum of all levels."""
    return _smallest(root, "memory", _memory_limit)


def swap_limit(root: Path = Path("/")) -> int | Unlimited | None:
    """Reads how many bytes of swap the control groups of this process allow, beside the smallest memory limit."""
    swap = _smallest(root, "memory", lambda folder: _limit(folder / "memory.swap.max"))
    # Version 1 limits memory and swap together.
    both = _smallest(root, "memory", lambda folder: _limit(folder / "memory.memsw.limit_in_bytes"))
    memory = memory_limit(root)
    if swap is None and isinstance(both, int) and isinstance(memory, int):
        return max(0, both - memory)
    return swap


def memory_group(root: Path = Path("/")) -> tuple[str, int] | None:
    """Finds the control group with the smallest memory limit: a name that is unique on this machine, and bytes."""
    found = [
        (limit, folder, hidden)
        for folder, hidden in _control_groups(root, "memory")
        if isinstance(limit := _memory_limit(folder), int)
    ]
    if not found:
        return None
    limit, folder, hidden = min(found, key=lambda each: each[0])
    # In different containers the folders of different groups may have the same name, with version 1 in one namespace.
    try:
        namespace = (root / "proc/self/ns/cgroup").stat().st_ino
    except OSError:
        namespace = 0
    return f"{folder.relative_to(root)}{hidden} in {namespace}", limit


def _memory_limit(folder: Path) -> int | Unlimited | None:
    unified = _limit(folder / "memory.max")
    return _limit(folder / "memory.limit_in_bytes") if unified is None else unified


def _limit(path: Path) -> int | Unlimited | None:
    text = read_text(path) or ""
    if text.strip() == "max":
        return "unlimited"
    if not text.strip().isdecimal():
        return None
    return "unlimited" if int(text) >= _NO_LIMIT else int(text)


def _smallest(
    root: Path, controller: str, read: Callable[[Path], _Number | Unlimited | None]
) -> _Number | Unlimited | None:
    found = [value for folder, _ in _control_groups(root, controller) if (value := read(folder)) is not None]
    limits = [value for value in found if value != "unlimited"]
    if limits:
        return min(limits)
    return "unlimited" if found else None


def _control_groups(root: Path, controller: str) -> Iterator[tuple[Path, str]]:
    """Yields the folders of this process's control groups, innermost first, each with the path if that is hidden.

    Inside a container the path may point outside the mounted tree; then the mount itself is the innermost.
    """
    mounted = root / "sys/fs/cgroup"
    for line in (read_text(root / "proc/self/cgroup") or "0::/").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            bases = [mounted, mounted / "unified"]
        elif controller in controllers.split(","):
            bases = [mounted / name for name in dict.fromkeys([controllers, controller])]
        else:
            continue
        parts = [part for part in path.split("/") if part not in {"", ".."}]
        for base in bases:
            hidden = "" if base.joinpath(*parts).is_dir() else path
            for depth in range(len(parts), -1, -1):
                yield base.joinpath(*parts[:depth]), hidden
