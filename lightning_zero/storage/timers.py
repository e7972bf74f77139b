"""Timers of the phases of a step.

The time between two moments belongs to the innermost phase that is open then, and to no other, so that the phases of a
step add up to its wall time. On an accelerator the moments are events on the current stream: a phase's time is then
that of the device, what it waits for the host included, and what runs on other streams at the same time costs nothing.
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
from lightning_zero.storage.streams import in_lane
from lightning_zero.storage.work_log import WORK_LOG

P = ParamSpec("P")
R = TypeVar("R")


class Phase(StrEnum):
    """Phases of a step; the time of a phase inside another counts as its own alone."""

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
    """Times the phases of steps; off, and free, until :meth:`start`."""

    def __init__(self) -> None:
        self._clock: Clock | None = None
        self._open: list[Phase | None] = [Phase.OTHER]  # from the outermost on; None: not counted
        self._marks: list[tuple[Phase | None, Any]] = []  # of the step under way: which phase goes on from when
        self._ended: deque[list[tuple[Phase | None, Any]]] = deque()  # steps that nobody has taken

    def start(self, device: torch.device) -> None:
        """Begin with a step, whose computations run on ``device``."""
        self._clock = device_type(device).clock(device)
        self._open, self._ended = [Phase.OTHER], deque()
        self._marks = [(Phase.OTHER, self._clock.now())]

    def stop(self) -> None:
        """Measure nothing from now on; forgets what was not taken."""
        self._clock = None
        self._marks, self._ended = [], deque()

    def phase(self, phase: Phase) -> AbstractContextManager[None]:
        """Around code whose time belongs to ``phase``; that of a lane beside the training belongs to none."""
        return self._timed(phase) if self._watched and not in_lane() else _UNTIMED

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
            del self._open[depth + 1 :]  # what an exception left open
            self.end()

    def begin(self, phase: Phase | None) -> None:
        """Open a phase that :meth:`end` closes; ``None``: time that belongs to no step, such as a validation's."""
        if self._watched:
            self._open.append(None if self._open[-1] is None else phase)
            self._mark()

    def end(self) -> None:
        """Close the phase that was opened last."""
        if self._watched and len(self._open) > 1:  # else it was opened while nobody watched
            self._open.pop()
            self._mark()

    def _mark(self) -> None:
        phase = self._open[-1]
        WORK_LOG.phase(phase)
        if self._clock is not None:
            self._marks.append((phase, self._clock.now()))

    def end_step(self) -> None:
        """A step ends, and the next begins."""
        if self._clock is not None:
            self._mark()
            self._ended.append(self._marks)
            self._marks = self._marks[-1:]

    def take(self, wait: bool = False) -> list[dict[Phase, float]]:
        """Seconds by phase of the steps that have ended since the last call, oldest first.

        Args:
            wait: for the device to end them; otherwise those that it works on are left for the next call.
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
    """Decorate a method of an object that has ``timers``: its time belongs to ``phase``."""

    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(method)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            timers: Timers = args[0].timers  # type: ignore[attr-defined]
            with timers.phase(phase):
                return method(*args, **kwargs)

        return run

    return decorate
