"""A log with times of what lanes do, of the training's phases, and of what the training waits for.

The process has one log, :data:`WORK_LOG`, as torch has one profiler. It is off, and costs nothing, until someone starts
a recording, of which several may run. On an accelerator moments are events. Work of a lane that has a stream is timed
on that stream; phases and waits are timed on the stream that computes, so that a wait lasts as long as that stream
stands still. Work of threads on host memory is timed by the host's clock. Both clocks begin together.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.profiler import record_function

from lightning_zero.storage.accelerators import Clock, device_type
from lightning_zero.torch_private import profiles

TRAINING, EXPOSED = "training", "exposed"  # tracks beside those of lanes
_REMEMBERED = 16  # times in which a track was busy, with which later spans may overlap


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


class Recording:
    """The spans that are noted from its start on, for whoever started it.

    Attributes:
        clock: measures the times of the device.
        zero: the start by the device's clock and the host's.
        paused: whether nothing is noted now.
    """

    def __init__(self, log: WorkLog, device: torch.device, phase: str | None) -> None:
        kind = device_type(device)
        kind.synchronize(device)
        self.clock: Clock = kind.clock(device)
        self.zero: tuple[Any, float] = self.clock.now(), time.perf_counter()
        self.paused = False
        self._log, self._device = log, device
        self._marks = deque[_Marks]()  # several threads append to it
        self._phases: list[tuple[str | None, Any]] = [(phase, self.zero[0])]
        self._follows_phases = phase is not None

    def add(self, marks: _Marks) -> None:
        """Note a piece of work or a wait."""
        if not self.paused:
            self._marks.append(marks)

    def phase(self, phase: str | None) -> None:
        """Note that the training is in ``phase`` from now on; see :meth:`WorkLog.phase`."""
        if self._follows_phases:
            self._phases.append((phase, self.clock.now()))

    def take(self) -> list[Span]:
        """The spans without phases that have ended since the last call, by their starts; waits for nothing.

        Those that the device has not ended are left for the next call.
        """
        spans, later = list[Span](), list[_Marks]()
        for _ in range(len(self._marks)):
            marks = self._marks.popleft()
            if marks.on_device and not self.clock.reached(marks.end):
                later.append(marks)
            else:
                spans.append(self._span(marks))
        self._marks.extendleft(reversed(later))
        return sorted(spans, key=lambda span: span.start)

    def stop(self) -> list[Span]:
        """End the recording, wait for the device, and return the spans that :meth:`take` has not returned.

        Jobs that threads still do are not among them.
        """
        self.cancel()
        self._phases.append((None, self.clock.now()))
        device_type(self._device).synchronize(self._device)
        spans = [self._span(each) for each in self._marks]
        for (phase, start), (_, end) in pairwise(self._phases):
            if phase is not None:
                spans.append(self._span(_Marks(TRAINING, phase, True, start, end)))
        return sorted(spans, key=lambda span: span.start)

    def cancel(self) -> None:
        """End the recording without waiting."""
        self._log.recordings = tuple(each for each in self._log.recordings if each is not self)

    def _span(self, marks: _Marks) -> Span:
        zero = self.zero[0 if marks.on_device else 1]
        start, end = (
            self.clock.between(zero, mark) if marks.on_device else mark - zero for mark in (marks.start, marks.end)
        )
        return Span(marks.track, marks.name, start, end, marks.lane)


class LaneSeconds:
    """Adds up how long lanes were busy, and how long the training waited for them.

    Attributes:
        busy: by track, the seconds in which there was at least one span.
        exposed: by lane, the seconds of the training's waits.
    """

    def __init__(self) -> None:
        self.busy: defaultdict[str, float] = defaultdict(float)
        self.exposed: defaultdict[str, float] = defaultdict(float)
        self._busy_in: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)  # by track, the last times

    def add(self, span: Span) -> None:
        """Count a span. Of a track with several at a time, they come in about the order of their starts."""
        start, end = span.start, max(span.end, span.start)  # rounding may put the end slightly before the start
        if span.track == EXPOSED:
            self.exposed[span.lane] += end - start
        times = self._busy_in[span.track]
        joined = [each for each in times if each[0] <= end and start <= each[1]]
        start, end = min([start, *(each[0] for each in joined)]), max([end, *(each[1] for each in joined)])
        self.busy[span.track] += end - start - sum(each[1] - each[0] for each in joined)
        self._busy_in[span.track] = [*(each for each in times if each not in joined), (start, end)][-_REMEMBERED:]


class WorkLog:
    """Notes spans while there are recordings.

    Attributes:
        recordings: those that run.
    """

    def __init__(self) -> None:
        self.recordings: tuple[Recording, ...] = ()

    @property
    def on(self) -> bool:
        """Whether there is a recording."""
        return bool(self.recordings)

    def start(self, device: torch.device, phase: str | None = None) -> Recording:
        """Start a recording, after the device has ended what it does.

        Args:
            device: on which the training computes.
            phase: in which the training is now. ``None``: phases are not recorded.
        """
        self.recordings = (*self.recordings, recording := Recording(self, device, phase))
        return recording

    def phase(self, phase: str | None) -> None:
        """Note that the training is in ``phase`` from now on; ``None``: in no phase that counts."""
        for recording in self.recordings:
            recording.phase(phase)

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
        recordings = self.recordings
        if not recordings:
            yield
            return
        now = recordings[0].clock.now if on_device else time.perf_counter
        start = now()
        yield
        marks = _Marks(track, what, on_device, start, now(), lane)
        for recording in recordings:
            recording.add(marks)


def named(what: str) -> AbstractContextManager[object]:
    """A context that is a named range in torch's profiler, if the profiler runs."""
    return record_function(what) if profiles() else _NOTHING


_NOTHING = nullcontext()
WORK_LOG = WorkLog()
