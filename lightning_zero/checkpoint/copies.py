"""Finds the copies of a checkpoint that ranks see: nodes without a common file system have one each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_zero import limits
from lightning_zero.checkpoint.errors import together
from lightning_zero.checkpoint.remote import Location, RemotePath
from lightning_zero.sharding import Group


@dataclass(frozen=True, slots=True)
class Copies:
    """The copies of a checkpoint. The ranks that see the same one share the work of verifying it.

    Attributes:
        ranks: for each copy the ranks that see it, in ascending order.
        rank: number of this rank among those that see its copy.
        size: number of ranks that see this rank's copy.
    """

    ranks: Sequence[Sequence[int]]
    rank: int
    size: int

    def place(self, number: int) -> str:
        """The end of a sentence that says which copy is meant; empty if there is only one."""
        return f" in the copy that rank {self.ranks[number][0]} sees" if len(self.ranks) > 1 else ""


class _Seen(NamedTuple):
    """A file as a rank sees it."""

    file: Hashable  # numbers or a name that ranks which see the same file have in common
    machine: str
    device: int


def find_copies(path: Location, world: Group) -> Copies:
    """Find which ranks see the same file at ``path``. Collective.

    Raises:
        CheckpointError: a rank does not see one; raised on all ranks.
    """
    seen = together(world, lambda: _look(path), f"read {path}")
    # A file system that several machines mount may have another device number on each, but not on one of them. There
    # new file systems of several containers give their files the same numbers, and times that are the same tick.
    devices: defaultdict[Hashable, set[int]] = defaultdict(set)
    for file, machine, device in seen:
        devices[file, machine].add(device)
    found: defaultdict[Hashable, list[int]] = defaultdict(list)
    for rank, each in enumerate(seen):
        found[each if len(devices[each.file, each.machine]) > 1 else each.file].append(rank)
    own = next(ranks for ranks in found.values() if world.rank in ranks)
    return Copies([*found.values()], own.index(world.rank), len(own))


def _look(path: Location) -> _Seen:
    if isinstance(path, RemotePath):
        return _Seen(str(path), "", 0)
    # Where these numbers differ between machines for one file, each machine reads all of it.
    status = path.stat()
    return _Seen((status.st_ino, status.st_size, status.st_ctime_ns), limits.boot(), status.st_dev)
