"""Writes checkpoints in the background, while training continues.

The thread is none of an executor's lanes. A save waits for the disk and for other ranks, and work of the training
in the same lane would wait behind it. An executor may also finish work before it returns the ticket, so that the
training would wait for the save. When the process exits, it waits for this thread without limit, so that the checkpoint
is completed; it waits for lanes a few seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from functools import partial

from lightning_zero.checkpoint.commit import Save
from lightning_zero.checkpoint.errors import together
from lightning_zero.sharding import Group
from lightning_zero.storage import Executor

log = logging.getLogger(__name__)


class Background:
    """Writes one checkpoint at a time, in a separate thread.

    Args:
        world: a group of all ranks that nothing else uses.
        executor: copies the state to host memory.
    """

    def __init__(self, world: Group, executor: Executor) -> None:
        self._world = world
        self._copier = executor
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._written: Future[None] | None = None
        self._afterwards: list[Future[None]] = []

    def start(self, save: Save, world: Group) -> None:
        """Copy the state that ``save`` writes, and begin to write the copy. Collective. Call :meth:`wait` before.

        Args:
            save: a save that has begun.
            world: a group of all ranks for the calling thread.

        Raises:
            CheckpointError: a rank cannot hold the copy; raised on all ranks.
        """
        assert self._written is None, "one checkpoint at a time"
        try:
            together(world, partial(save.hold, self._copier), "copy the checkpoint to host memory")
        except BaseException:
            save.abandon()
            raise
        self._written = self._executor.submit(self._write, save)

    def _write(self, save: Save) -> None:
        try:
            save.write(self._world)
        except BaseException as error:
            log.error("%s", error)  # logged, since `wait` may never be called
            raise

    def after(self, act: Callable[[], None]) -> None:
        """Run ``act`` after the current save is complete, or never if the save fails."""
        written = self._written

        def run() -> None:
            if written is None or written.exception() is None:
                try:
                    act()
                except Exception as error:  # noqa: BLE001  # it concerns this rank only, and others would wait for it
                    log.error("%s", error)

        self._afterwards.append(self._executor.submit(run))

    def wait(self) -> None:
        """Wait for the end of the save, and of the functions passed to :meth:`after`.

        Raises:
            CheckpointError: the save failed on a rank; raised on all ranks.
        """
        pending = [future for future in (self._written, *self._afterwards) if future is not None]
        wait_for(pending)  # where the user interrupts this, the next call waits for them again
        self._written, self._afterwards = None, []
        for future in pending:
            future.result()
