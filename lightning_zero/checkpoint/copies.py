"""Finds the copies of a checkpoint that ranks see: nodes without a common file system have one each."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

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


def find_copies(path: Location, world: Group) -> Copies:
    """Find which ranks see the same file at ``path``. Collective.

    Raises:
        CheckpointError: a rank does not see one; raised on all ranks.
    """
    seen = together(world, lambda: _identity(path), f"read {path}")
    ranks: dict[Hashable, list[int]] = {}
    for rank, identity in enumerate(seen):
        ranks.setdefault(identity, []).append(rank)
    own = ranks[seen[world.rank]]
    return Copies([*ranks.values()], own.index(world.rank), len(own))


def _identity(path: Location) -> Hashable:
    """Numbers or a name that only the ranks that see the same file have in common."""
    if isinstance(path, RemotePath):
        return str(path)
    # Not the device, whose number may be another one on each node that mounts a file system. Where these numbers differ
    # between nodes for one file, too, each node reads all of it.
    status = path.stat()
    return status.st_ino, status.st_size, status.st_ctime_ns
