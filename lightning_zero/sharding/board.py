"""Short notes of every rank that the others read without its help, when they have waited for it in vain."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from enum import StrEnum

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from lightning_zero.advice import Case, advice


class Subject(StrEnum):
    """The subjects of notes; of each a rank's last note counts."""

    FAILURE = "failure"  # the error that ended this rank's part
    LOADER = "loader"  # where its loader ran out


class Board:
    """Notes of all ranks in the store of the process group, which rank 0's process keeps as long as it lives.

    Args:
        rank: this process's.
        size: number of ranks.
        store: shared by them; ``None``: nothing is noted.
        name: of this board among others in the store.
    """

    def __init__(self, rank: int = 0, size: int = 1, store: Store | None = None, name: str = "") -> None:
        self.rank, self.size = rank, size
        self._store = None if store is None else PrefixStore(f"lightning_zero/{name}", store)

    def put(self, subject: Subject, text: str) -> None:
        """Note ``text`` in the place of what this rank noted before; where the store is gone nobody can read it."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # of a rank that ends because rank 0 has ended
                self._store.set(f"{subject}/{self.rank}", text)

    def read(self, subject: Subject) -> dict[int, str]:
        """The notes by rank, of those that made one; waits for nobody.

        Raises:
            RuntimeError: the store is gone.
        """
        if self._store is None:
            return {}
        keys = {rank: f"{subject}/{rank}" for rank in range(self.size)}
        notes = {rank: self._store.get(key).decode() for rank, key in keys.items() if self._store.check([key])}
        return {rank: note for rank, note in notes.items() if note}

    def explain(self) -> str:
        """Say why other ranks may be missing, as far as they noted it; else nothing."""
        try:
            failures = self.read(Subject.FAILURE)
            failures.pop(self.rank, None)
            if failures:
                return "; ".join(f"rank {rank} failed: {text}" for rank, text in failures.items())
            return uneven_loaders(self.read(Subject.LOADER), self.size)
        except RuntimeError:
            return "rank 0 has ended: its own message, or the system's log, says why"


def uneven_loaders(notes: Mapping[int, str], size: int) -> str:
    """Say which ranks' loaders ran out where those of others did not; nothing where all are at the same place.

    Args:
        notes: by rank: where its loader ran out last.
        size: number of ranks.
    """
    if len(notes) in (0, size) and len({*notes.values()}) <= 1:
        return ""
    ends = "; ".join(f"on rank {rank} {text}" for rank, text in notes.items())
    others = [str(rank) for rank in range(size) if rank not in notes]
    rest = f"; not yet on rank{'s' * (len(others) > 1)} {', '.join(others)}" if others else ""
    return f"a loader ran out of batches: {ends}{rest}{advice(Case.UNEVEN_LOADERS, '. ')}"
