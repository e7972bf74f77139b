"""Saves that are written while training goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from lightning_zero.checkpoint.commit import Save
from lightning_zero.checkpoint.errors import together
from lightning_zero.sharding import Group
from lightning_zero.storage import Executor

log = logging.getLogger(__name__)


class Background:
    """Writes one checkpoint at a time, in a thread of its own.

    Args:
        world: all ranks, in a group that nothing else uses.
        executor: copies what will be written to host memory.
    """

    def __init__(self, world: Group, executor: Executor) -> None:
        self._world = world
        self._copier = executor
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._written: Future[None] | None = None
        self._afterwards: list[Future[None]] = []

    def start(self, save: Save, world: Group) -> None:
        """Take a snapshot of what ``save`` writes and begin to write it. Collective; :meth:`wait` comes before.

        Args:
            save: has begun.
            world: all ranks, for this thread.

        Raises:
            CheckpointError: on all ranks, where one of them cannot hold the copy.
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
            log.error("%s", error)  # nobody may wait for it any more
            raise

    def after(self, act: Callable[[], None]) -> None:
        """Run ``act`` when what is being written is complete; not at all where that fails."""
        written = self._written

        def run() -> None:
            if written is None or written.exception() is None:
                try:
                    act()
                except OSError as error:  # on this rank alone: the others would wait for it
                    log.error("%s", error)

        self._afterwards.append(self._executor.submit(run))

    def wait(self) -> None:
        """Wait for the end of the save, and of what was to follow it.

        Raises:
            CheckpointError: on all ranks, where the save failed on one.
        """
        pending = [future for future in (self._written, *self._afterwards) if future is not None]
        self._written, self._afterwards = None, []
        for future in pending:
            future.result()
