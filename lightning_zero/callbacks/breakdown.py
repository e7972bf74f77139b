"""A breakdown of the time of training steps into phases."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.profilers import Profiler
from lightning_utilities.core.rank_zero import rank_zero_warn
from rich.console import Console
from rich.table import Table
from typing_extensions import override

from lightning_zero.integration.strategy import ZeroStrategy
from lightning_zero.storage import WORK_LOG, Executor, Lane, Phase, ThreadExecutor, Timers
from lightning_zero.storage.threads import FILE_LANES
from lightning_zero.storage.work_log import LaneSeconds

Times = Mapping[Phase, float]


class LaneTime(NamedTuple):
    """Seconds for which a lane was busy, and for which the training waited for it."""

    busy: float
    exposed: float


LaneTimes = Mapping[Lane, LaneTime]


class Breakdown(pl.Callback):
    """Logs how long a step spends in each phase, and prints a table when training ends.

    A step lasts from the end of the last batch of one optimizer step to that of the next, with all its micro-batches
    and without validation. Each moment counts for one phase, the innermost, so that the phases add up to the step's
    wall time:

    * ``forward``, ``backward``: the model's own computation.
    * ``reduce``: collecting, summing and storing gradients; ``gather``: unsharding parameters. Both exclude ``wait``.
    * ``wait``: waiting for data of other ranks. The fastest rank waits longest. (On an accelerator: the time that the
      computing stream waits.)
    * ``host copy``: copying shards, gradients and masters to and from host memory, and batches to the device.
    * ``optimizer``: norms, clipping, update.
    * ``data``: loading the next batch; ``other``: callbacks, loggers, checkpoints, Lightning's loops.

    On an accelerator the times are measured on the stream, by events for which no step waits, so that the values may be
    logged some steps later. In manual optimization call ``self.manual_backward``: the time of a plain
    ``loss.backward()`` is counted as ``forward``. Under another strategy than :class:`~lightning_zero.ZeroStrategy` the
    callback only warns.

    The times are logged as ``time_ms/forward`` and so on, in milliseconds.

    A second table has the *lanes* whose work runs beside the training, with names as in
    :class:`~lightning_zero.callbacks.Trace`: how long each was busy in a step, and for how long of that the training
    waited (``exposed``); the rest overlaps with the phases. On CPU ranks these are the lanes of a disk. They are timed
    by two marks for each piece of work and each wait, which are events on an accelerator, and once the host waits for
    the device. ``lanes=False`` leaves them out.

    Attributes:
        steps: number of steps in the means.

    Args:
        table: print the means over steps and ranks on rank 0 when training ends.
        skip_steps: number of first steps that the means leave out, since these allocate, compile and check the ranks.
        lanes: time the lanes, too.

    Raises:
        ValueError: ``skip_steps`` is negative.
    """

    def __init__(self, table: bool = True, skip_steps: int = 1, lanes: bool = True) -> None:
        if skip_steps < 0:
            raise ValueError(f"skip_steps={skip_steps} must be a number of steps >= 0")
        self.table = table
        self.skip_steps = skip_steps
        self.lanes = lanes
        self._timers: Timers | None = None  # while training
        self._watch: _LaneWatch | None = None
        self._reset()

    def _reset(self) -> None:
        self.steps = 0
        self._seconds = dict.fromkeys(Phase, 0.0)
        self._skipped = 0
        self._global_step = 0

    @property
    def means(self) -> dict[Phase, float]:
        """Seconds per step on this rank, by phase; they add up to the wall time. Zeros before the first step."""
        return {phase: seconds / max(self.steps, 1) for phase, seconds in self._seconds.items()}

    @property
    def lane_means(self) -> dict[Lane, LaneTime]:
        """Seconds per step on this rank, by lane; only lanes that have worked beside the training."""
        return {} if self._watch is None else self._watch.means

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not isinstance(strategy := trainer.strategy, ZeroStrategy):
            rank_zero_warn(
                f"Breakdown measures nothing under {type(strategy).__name__}; use a strategy of lightning_zero, such "
                "as zero0"
            )
            return
        self._reset()
        self._global_step = trainer.global_step
        self._timers = strategy.engine.timers
        self._profiler: Profiler = trainer.profiler  # type: ignore[attr-defined]
        trainer.profiler = _TimedProfiler(self._profiler, self._timers)  # type: ignore[attr-defined]
        self._timers.start(strategy.root_device)
        lanes = lanes_beside(strategy.engine.placement.executor) if self.lanes else ()
        self._watch = _LaneWatch(strategy.root_device, lanes, self.skip_steps) if lanes else None

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._timers is None or trainer.global_step == self._global_step:
            return
        self._global_step = trainer.global_step
        self._timers.end_step()
        if self._watch is not None:
            self._watch.end_step()
        if steps := self._timers.take():
            self._add(steps)
            values = {f"time_ms/{phase.replace(' ', '_')}": 1e3 * seconds for phase, seconds in steps[-1].items()}
            pl_module.log_dict(values, on_step=True, on_epoch=False)

    def _add(self, steps: Sequence[Times]) -> None:
        for step in steps:
            if self._skipped < self.skip_steps:
                self._skipped += 1
                continue
            self.steps += 1
            for phase, seconds in step.items():
                self._seconds[phase] += seconds

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._timers is not None:
            self._timers.begin(None)
        if self._watch is not None:
            self._watch.pause(True)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._timers is not None:
            self._timers.end()
        if self._watch is not None:
            self._watch.pause(False)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._timers is None:
            return
        self._add(self._timers.take(wait=True))
        if not self.steps:
            rank_zero_warn(
                f"Breakdown shows nothing: the training ended after {self._skipped} steps, and the means leave out the "
                f"first ones; got skip_steps={self.skip_steps}"
            )
        if self._watch is not None:
            self._watch.stop()
        self._stop(trainer)
        strategy = trainer.strategy
        assert isinstance(strategy, ZeroStrategy)
        if self.table:
            world = strategy.engine.placement.mesh.world
            found: list[tuple[Times, LaneTimes]] = world.all_gather_object(
                (self.means, self.lane_means), "collect the times of steps"
            )
            everyone, lanes = zip(*found, strict=True)
            if trainer.is_global_zero and self.steps:
                Console().print(table_of(everyone, self.steps))
                if any(lanes):
                    Console().print(lanes_table_of(lanes, self.steps))

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._stop(trainer)

    def _stop(self, trainer: pl.Trainer) -> None:
        if self._timers is not None:
            self._timers.stop()
            self._timers = None
            if self._watch is not None:
                self._watch.cancel()
            trainer.profiler = self._profiler  # type: ignore[attr-defined]


def lanes_beside(executor: Executor) -> Collection[Lane]:
    """The lanes whose work may run beside the training."""
    if executor.overlaps:
        return tuple(Lane)
    return tuple(FILE_LANES) if isinstance(executor, ThreadExecutor) else ()


class _LaneWatch:
    """Times lanes in all steps but the first ones.

    Args:
        device: on which the training computes.
        lanes: which are timed.
        skip_steps: number of first steps that are left out.
    """

    def __init__(self, device: torch.device, lanes: Collection[Lane], skip_steps: int) -> None:
        self._device, self._lanes, self._skip = device, lanes, skip_steps
        self._steps = 0  # that have been timed
        self._seconds = LaneSeconds()
        self._recording = None if skip_steps else WORK_LOG.start(device)

    @property
    def means(self) -> dict[Lane, LaneTime]:
        """Seconds per step, by lane, of lanes that have worked."""
        busy, exposed, steps = self._seconds.busy, self._seconds.exposed, max(self._steps, 1)
        return {
            lane: LaneTime(busy[lane.name] / steps, exposed.get(lane.name, 0.0) / steps)
            for lane in self._lanes
            if lane.name in busy
        }

    def end_step(self) -> None:
        """A step has ended."""
        if self._recording is not None:
            self._steps += 1
            for span in self._recording.take():
                self._seconds.add(span)
        elif self._skip > 0:
            self._skip -= 1
            if not self._skip:
                self._recording = WORK_LOG.start(self._device)

    def pause(self, paused: bool) -> None:
        """Do not time what runs now, or do so again."""
        if self._recording is not None:
            self._recording.paused = paused

    def stop(self) -> None:
        """End the timing, and wait for the device."""
        if self._recording is not None:
            for span in self._recording.stop():
                self._seconds.add(span)
            self._recording = None  # its events cannot be copied with the callback

    def cancel(self) -> None:
        """End the timing without waiting."""
        if self._recording is not None:
            self._recording.cancel()
            self._recording = None


def lanes_table_of(everyone: Sequence[LaneTimes], steps: int) -> Table:
    """Makes a table with a row for each lane: the means over ranks, and the largest of the ranks' exposed times.

    Args:
        everyone: by lane, mean seconds per step, of each rank; a lane that has not worked is missing.
        steps: number of steps in the means.
    """
    table = Table(title=f"Lanes beside a step, mean of {steps}")
    table.add_column("lane")
    several = len(everyone) > 1
    for name in ("busy, ms", "exposed, ms", *(("most exposed", "on rank") if several else ())):
        table.add_column(name, justify="right")
    for lane in Lane:
        if any(lane in times for times in everyone):
            busy, exposed = zip(*(times.get(lane, LaneTime(0.0, 0.0)) for times in everyone), strict=True)
            most = [f"{1e3 * max(exposed):.2f}", str(exposed.index(max(exposed)))] if several else []
            table.add_row(lane.name, f"{1e3 * fmean(busy):.2f}", f"{1e3 * fmean(exposed):.2f}", *most)
    return table


def table_of(everyone: Sequence[Times], steps: int) -> Table:
    """Makes a table with a row for each phase: its mean over ranks, its share of the step, and the ranks' range.

    Args:
        everyone: mean seconds per step by phase, of each rank.
        steps: number of steps in the means.
    """
    table = Table(title=f"Time of a step, mean of {steps}")
    table.add_column("phase")
    for name in ("ms", "share", *(("least", "most", "on rank") if len(everyone) > 1 else ())):
        table.add_column(name, justify="right")
    total = fmean(sum(times.values()) for times in everyone)
    for phase in Phase:
        seconds = [times[phase] for times in everyone]
        table.add_row(phase, *_cells(seconds, total), end_section=phase is Phase.OTHER)
    table.add_row("step", *_cells([sum(times.values()) for times in everyone], total))
    return table


def _cells(seconds: Sequence[float], total: float) -> list[str]:
    mean, most = fmean(seconds), max(seconds)
    cells = [f"{1e3 * mean:.2f}", f"{mean / total:.1%}"]
    if len(seconds) > 1:
        cells += [f"{1e3 * min(seconds):.2f}", f"{1e3 * most:.2f}", str(seconds.index(most))]
    return cells


def _phase_of(action_name: str) -> Phase | None:
    """Returns the phase of an action of Lightning's loops that no hook surrounds."""
    if action_name == "[_TrainingEpochLoop].train_dataloader_next":
        return Phase.DATA
    return Phase.HOST_COPY if action_name.endswith(".batch_to_device") else None


class _TimedProfiler(Profiler):
    """Runs the Trainer's own profiler and the timers."""

    def __init__(self, inner: Profiler, timers: Timers) -> None:
        super().__init__()
        self._inner = inner
        self._timers = timers

    def __del__(self) -> None:
        """Does nothing: the base class would tear down, but the inner profiler does this itself."""

    @override
    def start(self, action_name: str) -> None:
        self._inner.start(action_name)
        if phase := _phase_of(action_name):
            self._timers.begin(phase)

    @override
    def stop(self, action_name: str) -> None:
        if _phase_of(action_name):
            self._timers.end()
        self._inner.stop(action_name)

    @contextlib.contextmanager
    @override
    def profile(self, action_name: str) -> Iterator[str]:
        # The inner profiler's `profile` may do more than start and stop.
        phase = _phase_of(action_name)
        with self._inner.profile(action_name), self._timers.phase(phase) if phase else contextlib.nullcontext():
            yield action_name

    @override
    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        self._inner.setup(stage, local_rank, log_dir)

    @override
    def teardown(self, stage: str | None) -> None:
        self._inner.teardown(stage)

    @override
    def summary(self) -> str:
        return self._inner.summary()

    @override
    def describe(self) -> None:
        self._inner.describe()
