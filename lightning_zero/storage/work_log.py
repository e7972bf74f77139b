"""A log with times of what lanes do, of the training's phases, and of what the training waits for.

The process has one log, :data:`WORK_LOG`, as torch has one profiler. It is off, and costs nothing, until someone starts
it. On an accelerator moments are events. Work of a lane that has a stream is timed on that stream; phases and waits are
timed on the stream that computes, so that a wait lasts as long as that stream stands still. Work of threads on host
memory is timed by the host's clock. Both clocks begin together.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.profiler import record_function

from lightning_zero.storage.accelerators import Clock, device_type
from lightning_zero.torch_private import profiles

TRAINING, EXPOSED = "training", "exposed"  # tracks beside those of lanes


class Span(NamedTuple):
    """A piece of work, a phase or a wait.

    Attributes:
        track: the name of a lane for work, :data:`TRAINING` for a phase, or :data:`EXPOSED` for a wait of the training.
        name: the name of the work or of the phase; for a wait that of the work that was waited for.
        start: seconds since the log was started.
        end: as above.
        lane: for a wait the lane that was waited for; otherwise empty.
    """

    track: str
    name: str
    start: float
    end: float
    lane: str = ""


class _Marks(NamedTuple):
    """A span whose times are not known yet, because the device may not have reached them."""

    track: str
    name: str
    on_device: bool
    start: Any
    end: Any
    lane: str = ""


class WorkLog:
    """Notes spans while it is on.

    Attributes:
        on: whether it notes them now.
    """

    def __init__(self) -> None:
        self.on = False
        self._clock: Clock
        self._device: torch.device
        self._zero: tuple[Any, float]  # the start by the device's clock and the host's
        self._marks: list[_Marks] = []  # several threads append to it
        self._phases: list[tuple[str | None, Any]] = []

    def start(self, device: torch.device, phase: str) -> None:
        """Begin to note spans, and forget earlier ones. The training on ``device`` is in ``phase`` now."""
        kind = device_type(device)
        kind.synchronize(device)
        self._device, self._clock = device, kind.clock(device)
        self._zero = self._clock.now(), time.perf_counter()
        self._marks, self._phases = [], [(phase, self._zero[0])]
        self.on = True

    def stop(self) -> list[Span]:
        """Wait for the device, and return the spans that were noted. Jobs that threads still do are not among them."""
        self.on = False
        self._phases.append((None, self._clock.now()))
        device_type(self._device).synchronize(self._device)
        marks, self._marks = self._marks, []
        spans = [self._span(each) for each in marks]
        for (phase, start), (_, end) in pairwise(self._phases):
            if phase is not None:
                spans.append(self._span(_Marks(TRAINING, phase, True, start, end)))
        self._phases = []
        return sorted(spans, key=lambda span: span.start)

    def _span(self, marks: _Marks) -> Span:
        zero = self._zero[0 if marks.on_device else 1]
        start, end = (
            self._clock.between(zero, mark) if marks.on_device else mark - zero for mark in (marks.start, marks.end)
        )
        return Span(marks.track, marks.name, start, end, marks.lane)

    def phase(self, phase: str | None) -> None:
        """Note that the training is in ``phase`` from now on; ``None``: in no phase that counts."""
        if self.on:
            self._phases.append((phase, self._clock.now()))

    def work(self, lane: str, what: str, on_device: bool) -> AbstractContextManager[None]:
        """A context for work of a lane, in the lane's thread and on its stream.

        Args:
            lane: the lane's name.
            what: the name of the work.
            on_device: whether the current stream does the work.
        """
        return self._named(lane, what, on_device) if self.on or profiles() else _NOTHING

    @contextmanager
    def _named(self, lane: str, what: str, on_device: bool) -> Iterator[None]:
        with named(f"{lane}: {what}"), self._noted(lane, what, on_device):
            yield

    def wait(self, lane: str, what: str) -> AbstractContextManager[None]:
        """A context in which the thread that trains waits for work of a lane."""
        return self._noted(EXPOSED, what, True, lane) if self.on else _NOTHING

    @contextmanager
    def _noted(self, track: str, what: str, on_device: bool, lane: str = "") -> Iterator[None]:
        if not self.on:
            yield
            return
        now = self._clock.now if on_device else time.perf_counter
        noted, start = self._marks, now()
        yield
        noted.append(_Marks(track, what, on_device, start, now(), lane))


def named(what: str) -> AbstractContextManager[object]:
    """A context that is a named range in torch's profiler, if the profiler runs."""
    return record_function(what) if profiles() else _NOTHING


_NOTHING = nullcontext()
WORK_LOG = WorkLog()
