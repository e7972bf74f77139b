"""An executor with the slowest disk there can be."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from lightning_zero.storage import InlineExecutor, Lane, Ticket
from lightning_zero.storage.threads import FILE_LANES


class _Late:
    """The ticket of a job that nobody does before it is waited for."""

    def __init__(self, job: Callable[[], object], before: Sequence[Ticket], waiting: set[_Late]) -> None:
        self._job, self._before, self._waiting, self._ended = job, before, waiting, False
        waiting.add(self)

    def synchronize(self) -> None:
        if not self._ended:
            self._ended = True
            self._waiting.remove(self)
            for ticket in self._before:
                ticket.synchronize()
            self._job()
            del self._job, self._before

    wait = synchronize

    def done(self) -> bool:
        return self._ended


class SlowDisk(InlineExecutor):
    """Does jobs of the disk only when somebody waits for them, and then no other ones. Others keep their memory."""

    def __init__(self) -> None:
        self._waiting: set[_Late] = set()

    def submit(self, job: Callable[[], object], lane: Lane, what: str, after: Sequence[Ticket] = ()) -> Ticket:
        if lane not in FILE_LANES:
            return super().submit(job, lane, what, after)
        return _Late(functools.partial(super().submit, job, lane, what), after, self._waiting)
