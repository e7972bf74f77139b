"""Persistent pools of ranks: `pool.run(function, ...)` runs a function on every rank of a gloo world.

Each run has its own process group, and the variables of a launcher are set, so that `Trainer(accelerator="cpu",
devices=world_size)` uses the existing ranks and launches nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import pytest

from helpers import processes, rank_worker

T = TypeVar("T")

# One thread, and matrix products that do not depend on the position of a parameter in a flat buffer: by default MKL
# rounds differently for another alignment, especially in float64. Blocks of 1 MiB and more are mapped, and so returned
# to the system when they are freed; otherwise glibc keeps a varying amount of memory, up to double.
REPRODUCIBLE = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_CBWR": "COMPATIBLE",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
}
PRELOAD = ("numpy", "torch", "torch.distributed", "pytest", "lightning.pytorch", "lightning_zero")
START_TIMEOUT = 300.0
PATIENCE = 4  # ranks that are still working are stopped only after this multiple of the limit, for busy machines
LATE = 5.0  # seconds after the limit until a collective fails, so that the pool sees first which ranks hang, and where
GRACE = 3.0  # after a failure or the limit, a rank that has had no work for this number of seconds counts as hanging
GLANCE = 0.1  # seconds between two checks for this
PRINTING = 10.0  # seconds for hanging ranks to print their stacks
# The tests' path before any test adds to it (tests of the examples do), without the working folder, so that both sides
# import the same installed package, whichever test starts the fork server first.
IMPORT_PATH = tuple(str(Path(entry).absolute()) for entry in sys.path if entry)


def ranks(*world_sizes: int, slow: Sequence[int] = ()) -> pytest.MarkDecorator:
    """Run a test that uses the fixture `pool` once per world size; for the sizes in `slow` it is marked as slow."""
    sizes = [pytest.param(size, id=f"{size}ranks") for size in world_sizes]
    sizes += [pytest.param(size, id=f"{size}ranks", marks=pytest.mark.slow) for size in slow]
    return pytest.mark.parametrize("pool", sizes, indirect=True)


def slow_unless(fast: Sequence[Any], values: Iterable[Any]) -> list[Any]:
    """Values for `parametrize`; all except those in `fast` are marked as slow."""
    return [value if value in fast else pytest.param(value, marks=pytest.mark.slow) for value in values]


@dataclasses.dataclass(frozen=True)
class Failure:
    """The failure of a run on one rank; `kind` is the exception's class name, or "died" or "timeout"."""

    kind: str
    message: str
    traceback: str = ""
    answered: bool = True

    def describe(self, rank: int) -> str:
        return f"rank {rank}: {self.kind}: {self.message}\n{self.traceback}".rstrip()


class RankError(Exception):
    """Raised when a run fails; `failures` has the failures by rank, and `rank` is the one that failed first."""

    def __init__(self, failures: dict[int, Failure]) -> None:
        self.failures = failures
        self.rank = next(iter(failures))
        super().__init__("\n".join(failure.describe(rank) for rank, failure in failures.items()))


class ForkServer:
    """The process that ranks are forked from, which has imported `preload`; the first fork starts it."""

    def __init__(self, preload: Sequence[str] = PRELOAD) -> None:
        self._preload = preload
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def fork(self, spec: rank_worker.RankSpec) -> tuple[int, Connection]:
        """Fork a new rank, and return its process id and the connection to it."""
        control = self._control or self._start()
        ours, theirs = socket.socketpair()
        with theirs:
            request = json.dumps(dataclasses.asdict(spec)).encode()
            socket.send_fds(control, [request], [theirs.fileno()])
            pid = int(control.recv(64))
        return pid, Connection(ours.detach())

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        ours.settimeout(START_TIMEOUT)
        self._control = ours
        command = [sys.executable, rank_worker.__file__, str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=server_environment(),
                start_new_session=True,
            )
        ours.sendall(json.dumps([IMPORT_PATH, self._preload]).encode())
        if ours.recv(64) != b"ready":
            self.close()
            raise RuntimeError("the fork server of the rank pools did not start; its error is above")
        return ours

    def close(self) -> None:
        """End the server by closing its control socket; ranks end when their own connections are closed."""
        if self._control is not None and self._process is not None:
            self._control.close()
            self._process.wait(timeout=START_TIMEOUT)
            self._control = None


def server_environment() -> dict[str, str]:
    """The server's environment: reproducible arithmetic, no variables of multi-node launchers, gloo on loopback."""
    launcher = ("SLURM_", "TORCHELASTIC_", "OMPI_", "PMI_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(launcher)} | REPRODUCIBLE
    if "lo" in dict(socket.if_nameindex()).values():
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    return environment


class RankPool:
    """`world_size` processes that run functions together; they are started at first use, and again after a hang.

    For `setup` and `backend` see `rank_worker.RankSpec`.
    """

    grace = GRACE

    def __init__(
        self, world_size: int, server: ForkServer, *, timeout: float = 60.0, setup: str = "", backend: str = "gloo"
    ) -> None:
        self.world_size = world_size
        self.timeout = timeout
        self._setup, self._backend = setup, backend
        self._server = server
        self._folder = tempfile.TemporaryDirectory(prefix=f"ranks{world_size}-", ignore_cleanup_errors=True)
        self._pids: list[int] = []
        self._connections: list[Connection] = []
        self._printed = [0] * world_size
        self._jobs = 0

    @property
    def pids(self) -> tuple[int, ...]:
        """The ranks' process ids; empty if no ranks are running."""
        return tuple(self._pids)

    def start(self) -> None:
        """Start the ranks unless they are running."""
        if self._pids:
            return
        port = free_port()
        for rank in range(self.world_size):
            spec = self._spec(rank, port)
            pid, connection = self._server.fork(spec)
            self._pids.append(pid)
            self._connections.append(connection)

    def _spec(self, rank: int, port: int) -> rank_worker.RankSpec:
        return rank_worker.RankSpec(
            rank, self.world_size, self._folder.name, port, longest_wait(self.timeout), self._setup, self._backend
        )

    def run(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> list[T]:
        """Run `function(*args, **kwargs)` on every rank and return the results in rank order.

        The function must be at module level; arguments and results are pickled. The ranks' output is printed here.
        Raises RankError if any rank raises or dies, or if ranks hang after the pool's time limit.
        """
        return self.run_within(self.timeout, function, *args, **kwargs)

    def run_within(self, seconds: float, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> list[T]:
        """Like `run`, but with the time limit `seconds`."""
        job = self._job(seconds, function, args, kwargs)
        self.start()
        try:
            self._send(job)
            results, failures = self._collect(seconds)
        except BaseException:  # interrupted: answers of this run must not be mistaken for those of the next run
            self.kill()
            raise
        if all(failure.answered for failure in failures.values()):
            self._send(rank_worker.ALL_ANSWERED)
        else:
            self.kill()
        self._print_output()
        if failures:
            raise RankError(failures)
        return [pickle.loads(results[rank]) for rank in range(self.world_size)]

    def _send(self, message: bytes) -> None:
        for connection in self._connections:
            with contextlib.suppress(ConnectionError):  # the rank has died: `_collect` reports it
                connection.send_bytes(message)

    def kill(self) -> None:
        """Kill the ranks, with all processes that they started."""
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        for connection in self._connections:
            connection.close()
        self._pids, self._connections = [], []

    def close(self) -> None:
        self.kill()
        self._folder.cleanup()

    @staticmethod
    def check(function: Callable[..., Any]) -> None:
        """Raises TypeError if the ranks cannot find the function by its name."""
        if "<" in function.__qualname__:
            raise TypeError(f"{function.__qualname__} is not at module level: the ranks cannot find it by name")

    def _job(self, seconds: float, function: Callable[..., Any], args: Any, kwargs: Any) -> bytes:
        self.check(function)
        self._jobs += 1
        job = rank_worker.Job(
            number=self._jobs,
            module=function.__module__,
            path=str(Path(inspect.getfile(function)).absolute()),
            qualname=function.__qualname__,
            arguments=pickle.dumps((args, kwargs)),
            timeout=longest_wait(seconds),
        )
        return pickle.dumps(dataclasses.asdict(job))

    def _collect(self, seconds: float) -> tuple[dict[int, bytes], dict[int, Failure]]:
        """Each rank's result or failure, in order of arrival."""
        results: dict[int, bytes] = {}
        failures: dict[int, Failure] = {}
        waiting: dict[Any, int] = {connection: rank for rank, connection in enumerate(self._connections)}
        begin = worked = time.monotonic()
        while waiting:
            now, idle = time.monotonic(), worked + self.grace
            if now >= min(begin + PATIENCE * seconds, idle if failures else max(begin + seconds, idle)):
                failures.update(self._hung(list(waiting.values()), seconds))
                break
            unwatched = 0.0 if failures else begin + seconds - self.grace - now
            for connection in wait(list(waiting), timeout=max(GLANCE, unwatched)):
                rank = waiting.pop(connection)
                reply = receive_reply(self._connections[rank])
                if isinstance(reply, Failure):
                    failures[rank], worked = reply, time.monotonic()
                else:
                    results[rank] = reply
            # On a busy machine a rank may be late, but it has work to do then; a hanging rank has none.
            if unwatched <= 0.0 and any(processes.at_work(self._pids[rank]) for rank in waiting.values()):
                worked = time.monotonic()
        return results, failures

    def _hung(self, hung: list[int], seconds: float) -> dict[int, Failure]:
        """The failures of ranks that do not answer, after each of them has printed its stacks."""
        for rank in hung:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[rank], signal.SIGUSR1)
        deadline = time.monotonic() + PRINTING
        while not all(map(self._has_printed_stacks, hung)) and time.monotonic() < deadline:
            time.sleep(GLANCE)
        message = f"no answer within {seconds:g} s, or {self.grace:g} s after another rank's error"
        return {rank: Failure("timeout", f"{message}; {self._innermost(rank)}", answered=False) for rank in hung}

    def _has_printed_stacks(self, rank: int) -> bool:
        return b"in <module>\n" in self._last_stack(rank)

    def _last_stack(self, rank: int) -> bytes:
        """That of the first thread, which is printed last."""
        return self._output(rank).rpartition(b"(most recent call first):\n")[2]

    def _innermost(self, rank: int) -> str:
        """Where the first thread was: a summary that leaves output out shows the error."""
        frames = re.findall(r'File ".*?([^/"]+)", line (\d+) in (\S+)', self._last_stack(rank).decode(errors="replace"))
        calls = [f"{function} ({file}:{line})" for file, line, function in frames[:8]]
        return f"it was in {', called by '.join(calls)}" if calls else "it has printed no stack"

    def _output(self, rank: int) -> bytes:
        """The output of a rank that has not been printed here yet."""
        with Path(self._folder.name, f"rank{rank}.log").open("rb") as file:
            file.seek(self._printed[rank])
            return file.read()

    def _print_output(self) -> None:
        """Print the ranks' output of this run, which pytest shows if the test fails."""
        for rank in range(self.world_size):
            text = self._output(rank)
            self._printed[rank] += len(text)
            if text:
                print(f"--- output of rank {rank} ---\n{text.decode(errors='replace')}")


def longest_wait(seconds: float) -> float:
    """The limit of collectives in a run with the limit `seconds`."""
    return PATIENCE * seconds + LATE


def receive_reply(connection: Connection) -> bytes | Failure:
    try:
        status, *content = pickle.loads(connection.recv_bytes())
    except (EOFError, ConnectionError):
        return Failure("died", "the process ended; its last output may say why", answered=False)
    return content[0] if status == "result" else Failure(*content)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
