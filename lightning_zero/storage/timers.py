"""Timers of the phases of a step.

At each moment time belongs to the innermost phase that is open, and to no other, so that the times of all phases add up
to the wall time of the step. On an accelerator the moments are events on the current stream. A phase's time is then the
time of that stream, which includes its waits for the host; other streams do not count.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import StrEnum
from typing import Any, ParamSpec, TypeVar

import torch

from lightning_zero.storage.accelerators import Clock, device_type
from lightning_zero.storage.threads import in_lane, on_lane_stream
from lightning_zero.storage.work_log import WORK_LOG

P = ParamSpec("P")
R = TypeVar("R")


class Phase(StrEnum):
    """Phases of a step. Time of a phase inside another one counts only for the inner one."""

    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCE = "reduce"  # gradients are collected, averaged and kept
    GATHER = "gather"  # shards become full parameters
    HOST_COPY = "host copy"  # between the device and state that rests in host memory; batches to the device
    OPTIMIZER = "optimizer"  # norms, clipping, update
    WAIT = "wait"  # for what other ranks send, be it late or large
    DATA = "data"  # the next batch
    OTHER = "other"  # nothing of the above


class Timers:
    """Times the phases of steps. Until :meth:`start` it does nothing, and costs nothing."""

    def __init__(self) -> None:
        self._clock: Clock | None = None
        self._open: list[Phase | None] = [Phase.OTHER]  # the outermost first; None: time that is not counted
        self._marks: list[tuple[Phase | None, Any]] = []  # of the current step: the phase from each moment on
        self._ended: deque[list[tuple[Phase | None, Any]]] = deque()  # marks of steps that nobody has taken

    def start(self, device: torch.device) -> None:
        """Begin to measure, with a step that computes on ``device``."""
        self._clock = device_type(device).clock(device)
        self._open, self._ended = [Phase.OTHER], deque()
        self._marks = [(Phase.OTHER, self._clock.now())]

    def stop(self) -> None:
        """Stop measuring, and forget what :meth:`take` has not returned."""
        self._clock = None
        self._marks, self._ended = [], deque()

    def phase(self, phase: Phase) -> AbstractContextManager[None]:
        """A context for code whose time belongs to ``phase``. In a lane's thread or on its stream it does nothing."""
        return self._timed(phase) if self._watched and not (in_lane() or on_lane_stream()) else _UNTIMED

    @property
    def _watched(self) -> bool:
        return self._clock is not None or WORK_LOG.on

    @contextmanager
    def _timed(self, phase: Phase) -> Iterator[None]:
        depth = len(self._open)
        self.begin(phase)
        try:
            yield
        finally:
            del self._open[depth + 1 :]  # phases that an exception has left open
            self.end()

    def begin(self, phase: Phase | None) -> None:
        """Open a phase, which :meth:`end` closes; ``None``: time that belongs to no step, such as a validation's."""
        if self._watched:
            self._open.append(None if self._open[-1] is None else phase)
            self._mark()

    def end(self) -> None:
        """Close the phase that was opened last."""
        if self._watched and len(self._open) > 1:  # else it was opened before measuring began
            self._open.pop()
            self._mark()

    def _mark(self) -> None:
        phase = self._open[-1]
        WORK_LOG.phase(phase)
        if phase is None and self._marks and self._marks[-1][0] is None:
            return  # a validation has many phases that are not counted, and a mark may be an event on a device
        if self._clock is not None:
            self._marks.append((phase, self._clock.now()))

    def end_step(self) -> None:
        """A step ends, and the next begins."""
        if self._clock is not None:
            self._mark()
            self._ended.append(self._marks)
            self._marks = self._marks[-1:]

    def take(self, wait: bool = False) -> list[dict[Phase, float]]:
        """The seconds of each phase, for the steps that have ended since the last call, oldest first.

        Args:
            wait: whether to wait for the device. Otherwise steps that it has not ended are left for the next call.
        """
        steps: list[dict[Phase, float]] = []
        while self._ended and self._clock is not None:
            if not wait and not self._clock.reached(self._ended[0][-1][1]):
                break
            marks, seconds = self._ended.popleft(), dict.fromkeys(Phase, 0.0)
            for (phase, start), (_, end) in itertools.pairwise(marks):
                if phase is not None:
                    seconds[phase] += self._clock.between(start, end)
            steps.append(seconds)
        return steps


_UNTIMED = nullcontext()


def timed(phase: Phase) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a method so that its time belongs to ``phase``; the object has an attribute ``timers``."""

    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(method)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            timers: Timers = args[0].timers  # type: ignore[attr-defined]
            with timers.phase(phase):
                return method(*args, **kwargs)

        return run

    return decorate
