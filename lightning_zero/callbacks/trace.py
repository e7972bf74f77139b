"""A trace of lanes, phases and waits for Perfetto and chrome://tracing."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_zero.integration.strategy import ZeroStrategy
from lightning_zero.storage import WORK_LOG, Lane, Phase, Span
from lightning_zero.storage.threads import FILE_LANES
from lightning_zero.storage.work_log import EXPOSED, TRAINING, LaneSeconds, Recording
from lightning_zero.version import __version__

_TRACKS = (TRAINING, EXPOSED, *(lane.name for lane in Lane))
_OF_FILES = {lane.name for lane in FILE_LANES}


class Trace(pl.Callback):
    """Writes a timeline of a few steps to a file for each rank, for https://ui.perfetto.dev.

    Each *lane* is a track: copies to the device (``H2D``) and to host memory (``D2H``), work on host memory (``HOST``),
    reads and writes of a disk (with a second track, such as ``READ 2``, for two at the same time), reductions of
    gradients (``REDUCE``), gathers of shards that come from host memory (``GATHER``) or were updated under the forward
    (``COMM``), and computations of the device beside the training for an update (``SIDE``).
    A slice is one piece of work, with the name of its bucket. The track ``training`` shows the phases of
    :class:`Breakdown`. The track ``exposed`` shows the work for which the training waited, by name and lane; all other
    work of lanes overlaps with the training. Under ``otherData`` a file states for how many seconds each lane was busy,
    and for how many the training waited for it.

    On an accelerator the times of streams are measured by events, and those of threads on host memory by the host's
    clock. If nothing overlaps, as on CPU ranks, the lanes work inside of the phases, and ``exposed`` shows only the
    disk. After the last traced step the host waits for the device once. Under another strategy than
    :class:`~lightning_zero.ZeroStrategy` the callback only warns.

    Torch's own profiler shows the work of lanes and the collectives as ranges with the same names, also without this
    callback.

    Args:
        path: the folder of the files, which is made; rank 0 writes ``rank0.json`` there.
        first_step: number of optimizer steps before the first traced one; they allocate, compile and check the ranks.
        steps: number of traced optimizer steps.

    Raises:
        ValueError: ``first_step`` is negative, or ``steps`` is less than 1.
    """

    def __init__(self, path: str | Path = "trace", first_step: int = 2, steps: int = 3) -> None:
        if first_step < 0:
            raise ValueError(f"first_step={first_step} must be a number of steps >= 0")
        if steps < 1:
            raise ValueError(f"steps={steps} must be a number of steps >= 1")
        self.path = Path(path)
        self.first_step = first_step
        self.steps = steps
        self._begin: int | None = None  # `global_step` at the start of a fit that has not been traced yet
        self._recording: Recording | None = None  # while it runs

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin = trainer.global_step
        if not isinstance(strategy := trainer.strategy, ZeroStrategy):
            self._begin = None
            rank_zero_warn(
                f"Trace shows nothing under {type(strategy).__name__}; use a strategy of lightning_zero, such as zero0"
            )

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._begin is None or self._recording is not None:
            return
        if trainer.global_step >= self._begin + self.first_step:
            self._begin = trainer.global_step
            self._recording = WORK_LOG.start(trainer.strategy.root_device, Phase.OTHER)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._recording is not None and self._begin is not None and trainer.global_step >= self._begin + self.steps:
            self._write(trainer, self._recording)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._recording is not None:
            self._write(trainer, self._recording)
        elif self._begin is not None:
            rank_zero_warn(
                f"Trace shows nothing: the training ended after {trainer.global_step - self._begin} steps, before the "
                f"first traced one; got first_step={self.first_step}"
            )

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if self._recording is not None:
            self._recording.cancel()  # the device may not answer
            self._recording = None

    def _write(self, trainer: pl.Trainer, recording: Recording) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, ZeroStrategy)
        strategy.engine.await_updates()  # they belong to the last step
        spans = recording.stop()
        self._recording = self._begin = None
        self.path.mkdir(parents=True, exist_ok=True)
        made = chrome_trace(spans, strategy.global_rank, strategy.world_size)
        (self.path / f"rank{strategy.global_rank}.json").write_text(json.dumps(made))


def chrome_trace(spans: Sequence[Span], rank: int, world_size: int) -> dict[str, Any]:
    """Makes an object of Chrome's trace event format: a process for the rank, a thread for each track.

    Slices of one thread must not overlap there; so a lane has as many tracks as it has done jobs at the same time. The
    lane is busy while it does at least one.

    The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.

    Args:
        spans: of the rank, by their starts.
        rank: its number.
        world_size: number of ranks.
    """
    rows = _rows_of(spans)
    used = {(_TRACKS.index(span.track), row) for span, row in zip(spans, rows, strict=True)}
    threads = {(_TRACKS[track], row): number for number, (track, row) in enumerate(sorted(used))}
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank} of {world_size}"}},
        {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}},
    ]
    for (track, row), number in threads.items():
        at = {"ph": "M", "pid": rank, "tid": number}
        events.append({**at, "name": "thread_name", "args": {"name": f"{track} {row + 1}" if row else track}})
        events.append({**at, "name": "thread_sort_index", "args": {"sort_index": number}})
    seconds = LaneSeconds()
    for span, row in zip(spans, rows, strict=True):
        seconds.add(span)
        events.append(
            {
                "ph": "X",
                "pid": rank,
                "tid": threads[span.track, row],
                "cat": span.lane or span.track,
                "name": span.name,
                "ts": 1e6 * span.start,
                "dur": 1e6 * max(span.end - span.start, 0.0),  # rounding may put the end slightly before the start
            }
        )
    other = {"version": __version__, "busy_seconds": dict(seconds.busy), "exposed_seconds": dict(seconds.exposed)}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def _rows_of(spans: Sequence[Span]) -> list[int]:
    """The row of each span: 0, unless its lane was doing other work at its start."""
    rows, ends = [], defaultdict[str, list[float]](list)
    for span in spans:
        last = ends[span.track]
        several = span.track in _OF_FILES  # other tracks overlap only by rounding
        row = next((n for n, end in enumerate(last) if end <= span.start or not several), len(last))
        last[row : row + 1] = [span.end]
        rows.append(row)
    return rows
