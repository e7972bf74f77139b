"""A board for short notes of every rank, which other ranks read to explain why a collective failed.

Reading needs no help of the rank that wrote the note: notes are kept in the store of the process group.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from typing import TypeVar

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from lightning_zero.advice import Case, advice
from lightning_zero.limits import has_ended

T = TypeVar("T")

_SECONDS_TO_ANSWER = 3.0  # a store that does not answer within this time counts as gone
_SECONDS_TO_NOTE = 1.0  # time for other ranks, whose collectives fail at about the same time, to write their notes
_SECONDS_TO_AGREE = 5.0  # time for other ranks to come to a place to which this one has come unexpectedly
_SECONDS_BETWEEN = 0.05  # interval between two reads of the notes
_YES, _NO = "yes", "no"  # answers of all ranks together
_ANYONE = "-"  # the note of a rank that does not know which rank it has waited for


class Subject(StrEnum):
    """The subjects of notes. A rank has at most one note per subject, the last that it wrote."""

    FAILURE = "failure"  # the error that ended training on this rank
    LOADER = "loader"  # the position at which this rank's loader ran out of batches
    WAIT = "wait"  # the rank that this rank has waited for in vain


class SilentStoreError(RuntimeError):
    """Raised when the store has not answered in time."""


class Board:
    """Notes of all ranks in the store of the process group; the store lives in rank 0's process and ends with it.

    Args:
        rank: rank of this process.
        size: number of ranks.
        store: the store that all ranks share; ``None``: nothing is noted.
        name: name of this board among others in the store.
        hosts: host name of each rank; empty if they are not known.
        processes: :func:`~lightning_zero.limits.process_name` of each rank; empty if they are not known.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        store: Store | None = None,
        name: str = "",
        hosts: Sequence[str] = (),
        processes: Sequence[str] = (),
    ) -> None:
        self.rank, self.size = rank, size
        self._processes = processes
        self._hosts = hosts if len({*hosts}) > 1 else ()
        self._store = None if store is None else PrefixStore(f"lightning_zero/{name}", store)
        self._silent = False

    def describe(self, ranks: Iterable[int]) -> str:
        """Names ranks, with their nodes if there are several nodes, as in ``ranks 2, 3 on node1``."""
        by_host: dict[str, list[int]] = {}
        for rank in ranks:
            by_host.setdefault(self.place(rank), []).append(rank)
        return " and ".join(
            f"rank{'s' * (len(own) > 1)} {', '.join(map(str, own))}{place}" for place, own in by_host.items()
        )

    def place(self, rank: int) -> str:
        """The node of a rank, as in `` on node1``; an empty string if there is only one node."""
        return f" on {self._hosts[rank]}" if self._hosts else ""

    def put(self, subject: Subject, text: str) -> None:
        """Write this rank's note on ``subject``, in place of an earlier one; does nothing if the store is gone."""
        with contextlib.suppress(RuntimeError):  # this rank may be ending because rank 0 has ended
            self._ask(lambda store: store.set(f"{subject}/{self.rank}", text))

    def read(self, subject: Subject) -> dict[int, str]:
        """The notes on ``subject`` by rank, without the ranks that have none. Does not wait for other ranks.

        Raises:
            SilentStoreError: the store has not answered in time.
            RuntimeError: the store is gone.
        """
        keys = {rank: f"{subject}/{rank}" for rank in range(self.size)}
        notes: dict[int, str] = {}

        def read(store: Store) -> None:
            notes.update({rank: store.get(key).decode() for rank, key in keys.items() if store.check([key])})

        self._ask(read)
        return {rank: note for rank, note in notes.items() if note}

    def raise_flag(self, name: str) -> None:
        """Tell any rank that asks; does nothing if the store is gone."""
        with contextlib.suppress(RuntimeError):
            self._ask(lambda store: store.set(f"flag/{name}", "raised"))

    def is_raised(self, name: str) -> bool:
        """Whether some rank has raised the flag of this name; False if the store does not say so."""
        with contextlib.suppress(RuntimeError):
            return bool(self._ask(lambda store: store.check([f"flag/{name}"])))
        return False

    def agree(self, question: str, vote: Callable[[], str | None]) -> bool:
        """Ask whether all ranks give the same vote within a few seconds of each other.

        All ranks get the same answer, also those that come too late: the first rank that knows it writes it down. But a
        rank to which the store does not answer takes False for it, whatever the others have found.

        Args:
            question: its name, which is the same on all ranks, and another one for every question.
            vote: this rank's vote; empty: against; ``None``: it has none yet, and is asked again.

        Returns:
            Whether they do; False if the store is gone.
        """
        if self._store is None:
            return vote() != ""
        own, deadline = None, time.monotonic() + _SECONDS_TO_AGREE
        try:
            while True:
                if own is None and (own := vote()):
                    self._ask(partial(_give, question=question, vote=own))
                over = own == "" or time.monotonic() > deadline
                if answer := self._ask(partial(_answer, question=question, vote=own, size=self.size, over=over)):
                    return answer == _YES
                time.sleep(_SECONDS_BETWEEN)
        except RuntimeError:
            return False

    def _ask(self, use: Callable[[Store], T]) -> T | None:
        """Call ``use`` with the store, if there is one, and wait for a limited time; returns what it returns.

        The limit is needed because a connection to a node that is cut off waits for ever.

        Raises:
            SilentStoreError: the store has not answered in time, now or in an earlier call.
            RuntimeError: the store is gone.
        """
        store, results, errors = self._store, list[T](), list[RuntimeError]()
        if store is None:
            return None
        if self._silent:
            raise SilentStoreError

        def run() -> None:
            try:
                results.append(use(store))
            except RuntimeError as error:
                errors.append(error)

        # A daemon thread, so that the process can end although the store never answers.
        thread = threading.Thread(target=run, name="lightning_zero-board", daemon=True)
        thread.start()
        thread.join(_SECONDS_TO_ANSWER)
        if thread.is_alive():
            self._silent = True
            raise SilentStoreError
        if errors:
            raise errors[0]
        return results[0]

    def explain(self) -> str:
        """Explain from the notes why other ranks may be missing; an empty string if no note says why."""
        try:
            return self._noted()
        except SilentStoreError:
            return f"the store of {self.describe([0])} does not answer: that node, or the network to it, is down"
        except RuntimeError:
            return f"{self.describe([0])} has ended: its own message, or the system's log, says why"

    def _noted(self) -> str:
        failures = self.read(Subject.FAILURE)
        failures.pop(self.rank, None)
        if failures:
            return "; ".join(f"{self.describe([rank])} failed: {text}" for rank, text in failures.items())
        return uneven_loaders(self.read(Subject.LOADER), self.size)

    def find_missing(self, awaited: int | None, ended: bool = False) -> list[int]:
        """Find the ranks that caused this rank to wait in vain; an empty list if they cannot be determined.

        The awaited rank may itself be waiting for another rank, and then it notes so. The chain of these notes is
        followed to the first rank without such a note, which is the missing one.

        Args:
            awaited: the rank that this rank has waited for; ``None``: it may be any of the others.
            ended: whether the awaited rank has closed its connections. If its process has ended too, it will write no
                more notes, and this method returns at once, before a launcher that noticed the end kills this process.
        """
        deadline = time.monotonic() + _SECONDS_TO_NOTE
        self.put(Subject.WAIT, _ANYONE if awaited is None else str(awaited))
        try:
            while True:
                missing = self._missing(awaited, self.read(Subject.WAIT))
                over = time.monotonic() > deadline or self._store is None or (ended and self._have_ended(missing))
                if not missing or over:
                    return missing
                time.sleep(_SECONDS_BETWEEN)
        except RuntimeError:  # the store is gone, with the notes of the others
            return [] if awaited is None else [awaited]

    def _have_ended(self, ranks: Iterable[int]) -> bool:
        return bool(self._processes) and all(has_ended(self._processes[rank]) for rank in ranks)

    def _missing(self, awaited: int | None, waits: Mapping[int, str]) -> list[int]:
        if awaited is None:
            return [rank for rank in range(self.size) if rank not in waits and rank != self.rank]
        seen = {self.rank}
        while awaited in waits:
            if awaited in seen or waits[awaited] == _ANYONE:
                return []  # a cycle: these ranks wait for each other
            seen.add(awaited)
            awaited = int(waits[awaited])
        return [] if awaited in seen else [awaited]


def uneven_loaders(notes: Mapping[int, str], size: int) -> str:
    """Explain which ranks' loaders ran out of batches; an empty string if none or all did, at the same position.

    Args:
        notes: by rank, the position at which its loader ran out last.
        size: number of ranks.
    """
    if len(notes) in (0, size) and len({*notes.values()}) <= 1:
        return ""
    ends = "; ".join(f"on rank {rank} {text}" for rank, text in notes.items())
    others = [str(rank) for rank in range(size) if rank not in notes]
    rest = f"; not yet on rank{'s' * (len(others) > 1)} {', '.join(others)}" if others else ""
    return f"a loader ran out of batches: {ends}{rest}{advice(Case.UNEVEN_LOADERS, '. ')}"


def _give(store: Store, question: str, vote: str) -> None:
    store.add(f"{question}/votes/{vote}", 1)
    store.add(f"{question}/votes", 1)


def _answer(store: Store, question: str, vote: str | None, size: int, over: bool) -> str:
    """The answer that a rank has written down, or that this one can write down; empty if it is not known yet."""
    key = f"{question}/answer"
    if store.check([key]):
        return store.get(key).decode()
    given = store.add(f"{question}/votes", 0)  # before the next line: whoever is counted here is counted there, too
    same = store.add(f"{question}/votes/{vote}", 0) if vote else 0
    if same < size and given < size and not over:
        return ""
    return store.compare_set(key, "", _YES if same == size else _NO).decode()
