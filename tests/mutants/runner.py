"""Runs tests against a copy of the package, each run in a new process that has not imported the package.

The processes are forks of one that has imported pytest, torch and Lightning. A fork imports the package from its copy
instead of an installed one, and so do the ranks of the pools and all other processes that its tests start.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import multiprocessing
import os
import runpy
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
from helpers import rank_worker, ranks

from mutants.catalogue import Mutant

# The files that an editable installation of the package has outside the package's folder.
ELSEWHERE = ("conf", "ops._C")
OPTIONS = (
    "-mnot slow and not gpu",  # needed because a node id without parameters selects all cases of a test
    "--hypothesis-seed=0",
    "--quiet",
    "--tb=short",
    "-pno:cacheprovider",
    "-Wignore::pytest.PytestAssertRewriteWarning",  # about plugins that the process has already imported
)
# Python imports a module of this name at every start. It makes all processes find the copy first, even before the
# finder of an editable installation.
FINDER = "sitecustomize.py"
FIND_COPY_FIRST = """\
import sys
from importlib.machinery import PathFinder
from pathlib import Path


class Copy:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] == {package!r}:
            return PathFinder.find_spec(name, path or [str(Path(__file__).parent)], target)


sys.meta_path.insert(0, Copy)
"""


@dataclasses.dataclass(frozen=True)
class Project:
    """The tested project: an importable package, the folder that node ids are relative to, and modules to preload."""

    package: str
    root: Path
    preload: tuple[str, ...]

    @property
    def folder(self) -> Path:
        """The package's sources."""
        spec = importlib.util.find_spec(self.package)
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(f"no package {self.package} in this environment")
        return Path(spec.origin).parent

    def copy(self, target: Path) -> Path:
        """Copy the whole package into the folder `target`, in the layout of a wheel, with the finder."""
        # Without bytecode, because a mutant of the same size, planted in the same second, would not be compiled again.
        sources = shutil.ignore_patterns("__pycache__")
        copied = shutil.copytree(self.folder, target / self.package, ignore=sources)
        for name in ELSEWHERE:
            with contextlib.suppress(ModuleNotFoundError):
                spec = importlib.util.find_spec(f"{self.package}.{name}")
                if spec is not None and spec.origin is not None:
                    place = copied.joinpath(*name.split("."))
                    if spec.submodule_search_locations is None:
                        shutil.copy2(spec.origin, place.parent)
                    elif not place.exists():
                        shutil.copytree(Path(spec.origin).parent, place, ignore=sources)
        (target / FINDER).write_text(FIND_COPY_FIRST.format(package=self.package))
        return copied


@dataclasses.dataclass(frozen=True)
class Job:
    """Tests to run: pytest's arguments, with a mutant or without one."""

    arguments: tuple[str, ...]
    mutant: Mutant | None = None


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a job.

    Attributes:
        job: the job.
        status: pytest's exit status, the negative number of a signal that ended it, or ``None`` after the time limit.
        failed: by node id, the seconds that each failed test took.
        seconds: the seconds that the job took.
        output: the output of pytest and the tests.
    """

    job: Job
    status: int | None
    failed: dict[str, float]
    seconds: float
    output: str

    @property
    def killed(self) -> bool:
        return self.status is None or bool(self.failed)

    @property
    def passed(self) -> bool:
        return self.status == pytest.ExitCode.OK


class Recorder:
    """A pytest plugin that notes failed tests and files that cannot be imported."""

    def __init__(self) -> None:
        self.failed: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed[report.nodeid] = report.duration

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed[report.nodeid] = 0.0


def run(project: Project, jobs: Iterable[Job], folder: Path, *, side_by_side: int, limit: float) -> Iterator[Outcome]:
    """Run jobs and yield their outcomes as they end; `folder` is for temporary files, `limit` is in seconds per job."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(project.preload))
    os.environ.update(ranks.REPRODUCIBLE)  # before the processes start, since libraries read some of it only once
    running: dict[Connection, Run] = {}
    waiting = enumerate(jobs)
    try:
        while True:
            while len(running) < side_by_side and (numbered := next(waiting, None)):
                number, job = numbered
                started = Run(context, project, job, folder / str(number))
                running[started.connection] = started
            if not running:
                return
            deadline = min(each.start for each in running.values()) + limit
            ended = wait(list(running), timeout=max(0.0, deadline - time.monotonic()))
            late = [each for each in running if time.monotonic() > running[each].start + limit]
            for connection in [*ended, *(each for each in late if each not in ended)]:
                assert isinstance(connection, Connection)
                yield running.pop(connection).finish(in_time=connection in ended)
    finally:
        for each in running.values():
            each.kill()


class Run:
    """A running job, in a process group of its own."""

    def __init__(
        self, context: multiprocessing.context.ForkServerContext, project: Project, job: Job, folder: Path
    ) -> None:
        self.job, self.folder, self.start = job, folder, time.monotonic()
        copied = project.copy(folder)
        if job.mutant is not None:
            job.mutant.plant(copied)
        self.connection, theirs = context.Pipe(duplex=False)
        self._process: ForkServerProcess = context.Process(
            target=run_tests, args=(project, job.arguments, folder, theirs)
        )
        self._process.start()
        theirs.close()

    def finish(self, *, in_time: bool) -> Outcome:
        """End the job, killing processes that still run, and return its outcome."""
        status: int | None = None
        failed: dict[str, float] = {}
        if in_time:
            try:
                status, failed = self.connection.recv()
            except EOFError:  # it died: of a signal, for example after a use of freed memory, or before pytest began
                self._process.join()
                status = self._process.exitcode
                if status is not None and status < 0 and status != -signal.SIGKILL:  # SIGKILL: out of memory
                    failed = {f"died of {signal.Signals(-status).name}": 0.0}
        seconds = time.monotonic() - self.start
        self.kill()
        output = (self.folder / "output").read_text(errors="replace") if (self.folder / "output").exists() else ""
        shutil.rmtree(self.folder, ignore_errors=True)
        return Outcome(self.job, status, failed, seconds, output)

    def kill(self) -> None:
        """Kill the process with its group; the ranks end when they lose their connections."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        self._process.kill()  # it may not have created its group yet
        self._process.join()
        self.connection.close()


def run_tests(project: Project, arguments: Sequence[str], folder: Path, result: Connection) -> None:
    """Run pytest in this new process, with the copy of the package in `folder`."""
    os.setsid()
    with (folder / "output").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.chdir(project.root)
    early = [name for name in sys.modules if name.partition(".")[0] == project.package]
    assert not early, f"{early} were imported before the copy could be found"
    os.environ["PYTHONPATH"] = str(folder)
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    # Jobs share the machine with others, so the time limit of a test, which depends on the workers, is turned off.
    os.environ["PYTEST_XDIST_WORKER_COUNT"] = "1000"
    runpy.run_path(str(folder / FINDER))
    with forked_rank_server(result) as control:
        servers = [control]
        start_itself = ranks.ForkServer._start

        def start(server: ranks.ForkServer) -> socket.socket:
            return greet(server, servers.pop()) if servers else start_itself(server)

        ranks.ForkServer._start = start
        recorder = Recorder()
        status = pytest.main([*OPTIONS, *arguments], plugins=[recorder])
        sys.stdout.flush()
        result.send((int(status), recorder.failed))


@contextlib.contextmanager
def forked_rank_server(result: Connection) -> Iterator[socket.socket]:
    """A connection to a fork server of ranks that is a fork of this process, which has not imported the package."""
    ours, theirs = socket.socketpair()
    ours.settimeout(ranks.START_TIMEOUT)
    pid = os.fork()
    if pid == 0:
        ours.close()
        result.close()  # so that its end of file shows that the process which runs the tests has died
        environment = ranks.server_environment()
        os.environ.clear()
        os.environ.update(environment)
        rank_worker.make_tests_importable()
        with contextlib.suppress(json.JSONDecodeError):  # the connection was closed before the first request
            rank_worker.serve(theirs)
        os._exit(0)
    theirs.close()
    with ours:
        yield ours


def greet(server: ranks.ForkServer, control: socket.socket) -> socket.socket:
    """Let a running fork server serve `server`."""
    server._control = control
    control.sendall(json.dumps([ranks.IMPORT_PATH, ranks.PRELOAD]).encode())
    assert control.recv(64) == b"ready"
    return control
