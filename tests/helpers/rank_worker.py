"""The server side of `helpers.ranks`: a fork server, and the ranks that it forks.

The server imports torch, Lightning and the package once. A rank is a fork of it and starts within milliseconds, so that
a pool that had to be killed is quickly available again. This file runs as a script; `helpers.ranks` imports the message
types from it.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import faulthandler
import functools
import gc
import importlib
import importlib.util
import json
import os
import pickle
import queue
import random
import signal
import socket
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

MAX_MESSAGE = 65536
# The pool's message that all ranks have answered, so that none is still inside a collective of the job's group.
ALL_ANSWERED = b""


@dataclasses.dataclass(frozen=True)
class RankSpec:
    """The identity of a forked rank, its working folder, and the port in its launcher variables.

    `setup` names a function, as "module:function", that the rank calls before its first job. `backend` is the backend
    of its process groups, `timeout` the default limit of their collectives. Without a backend no process group is made;
    a job makes its own, by `variables`, which take precedence over those of a launcher. `namespaces` are the files of
    the namespaces that the rank enters.
    """

    rank: int
    world_size: int
    folder: str
    port: int
    timeout: float
    setup: str = ""
    backend: str = "gloo"
    namespaces: tuple[str, ...] = ()
    variables: dict[str, str] | None = None


@dataclasses.dataclass(frozen=True)
class Job:
    """A function to run, identified by its file and name, with pickled arguments; `timeout` limits its collectives."""

    number: int
    module: str
    path: str
    qualname: str
    arguments: bytes
    timeout: float


def serve(control: socket.socket) -> None:
    """Fork one rank per request until the tests close the connection."""
    sys.path[:], preload = json.loads(control.recv(MAX_MESSAGE))
    # Lightning asks mpi4py, where it is installed, for its ranks: MPI ends the process where it can start none.
    sys.modules["mpi4py"] = None  # type: ignore[assignment]
    for name in preload:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    remember_entry_points()
    control.sendall(b"ready")
    gc.collect()
    gc.freeze()  # imported objects live for ever, so a rank's garbage collections need not visit them
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended ranks are reaped automatically
    while True:
        request, fds, _, _ = socket.recv_fds(control, MAX_MESSAGE, 1)
        if not request:
            return
        pid = os.fork()
        if pid == 0:
            control.close()
            become_rank(fds[0], RankSpec(**json.loads(request)))
        os.close(fds[0])
        control.sendall(b"%d" % pid)


def become_rank(fd: int, spec: RankSpec) -> None:
    """Run jobs in this forked process until the pool closes the connection; does not return."""
    os.setsid()  # the pool kills the whole group, including data loader workers
    enter(spec.namespaces)  # entering a mount namespace makes its root the working folder
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal = keep_stacks(signal.signal)
    os.chdir(spec.folder)
    log = os.open(f"rank{spec.rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(log, number)
        stream.reconfigure(line_buffering=True)
    if spec.variables is None:
        os.environ.update(launcher_variables(spec))
    else:
        os.environ.pop("GLOO_SOCKET_IFNAME", None)  # the loopback device does not reach another node
        os.environ.update(spec.variables)
    if spec.setup:
        module, _, function = spec.setup.partition(":")
        getattr(importlib.import_module(module), function)()
    jobs: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    connection = Connection(fd)
    threading.Thread(target=receive, args=(connection, jobs), daemon=True).start()
    room = Room(spec)
    while True:
        message = jobs.get()
        if message == ALL_ANSWERED:
            room.prepare()
            continue
        print_stacks()
        reply = answer(Job(**pickle.loads(message)), spec, room)
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send_bytes(reply)


def print_stacks() -> None:
    """Print stacks at a fatal signal and at SIGUSR1."""
    faulthandler.disable()
    faulthandler.enable(file=sys.__stderr__)  # a test may have put another stream in its place
    faulthandler.unregister(signal.SIGUSR1)
    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__, all_threads=True)


def keep_stacks(set_handler: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `signal.signal`, by which a Trainer takes all handlers away that it does not know when it ends."""

    @functools.wraps(set_handler)
    def set_or_keep(number: int, handler: Any) -> Any:
        if number != signal.SIGUSR1 or handler != signal.SIG_DFL:
            return set_handler(number, handler)
        print_stacks()
        return signal.getsignal(number)

    return set_or_keep


def enter(namespaces: Sequence[str]) -> None:
    """Enter the namespaces with these files, such as `/proc/1/ns/net`, in order."""
    libc = ctypes.CDLL(None, use_errno=True)  # Python has os.setns from 3.12 on
    for path in namespaces:
        fd = os.open(path, os.O_RDONLY)
        if libc.setns(fd, 0) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
        os.close(fd)


def remember_entry_points() -> None:
    """Make Lightning read the entry points of installed packages only once instead of for every Trainer."""
    if registry := sys.modules.get("lightning.fabric.utilities.registry"):
        registry.entry_points = functools.cache(registry.entry_points)


class Room:
    """A fresh environment for a job: a process group, and a process without remains of the previous job.

    Making it takes longer than many jobs, mostly because of waits for gloo's threads. So the ranks prepare the
    environment of the next job while the tests check the results of the last one.
    """

    def __init__(self, spec: RankSpec) -> None:
        self._spec = spec
        self._number = 0  # number of the job that the process group is for

    def enter(self, number: int, timeout: float) -> None:
        """Provide the process group of a job: the prepared one or, for a pool's first job, a new one."""
        import torch

        if not self._spec.backend:
            return
        if number != self._number:
            self._make(number)
        # A prepared group is used even if its limit differs, because another rank may still be joining it, and would
        # fail if this rank destroyed it.
        torch.distributed.group.WORLD.set_timeout(timedelta(seconds=timeout))

    def prepare(self) -> None:
        """Make the process group of the next job."""
        if self._spec.backend:
            self._make(self._number + 1)

    def _make(self, number: int) -> None:
        import torch

        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        if number % 100 == 0:
            gc.unfreeze()  # objects that were in use at the last freeze: an engine keeps threads, which wake up often
        gc.collect()
        gc.freeze()  # objects imported by a job live for ever, too: torch.compile and transformers have 100,000 of them
        sys.excepthook = sys.__excepthook__  # each group installs a hook that prefixes its rank; one hook is enough
        torch.distributed.init_process_group(
            self._spec.backend,
            init_method=f"file://{self._spec.folder}/store{number}",
            rank=self._spec.rank,
            world_size=self._spec.world_size,
            timeout=timedelta(seconds=self._spec.timeout),
        )
        self._number = number


def launcher_variables(spec: RankSpec) -> dict[str, str]:
    """The environment variables that a launcher sets.

    LOCAL_RANK prevents LightningEnvironment from starting processes. TORCHELASTIC_RUN_ID is not set, because Lightning
    would take this for a launch by torchrun.
    """
    return {
        "LOCAL_RANK": str(spec.rank),
        "RANK": str(spec.rank),
        "NODE_RANK": "0",
        "WORLD_SIZE": str(spec.world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(spec.port),
    }


def receive(connection: Connection, jobs: queue.SimpleQueue[bytes]) -> None:
    """Pass jobs on; when the connection closes, the tests have ended, and the process group is killed."""
    while True:
        try:
            jobs.put(connection.recv_bytes())
        except (EOFError, OSError):
            os.killpg(0, signal.SIGKILL)


def answer(job: Job, spec: RankSpec, room: Room) -> bytes:
    """Run one job and return the reply: the pickled result or error."""
    try:
        function: Any = load_module(job.module, job.path)
        for name in job.qualname.split("."):
            function = getattr(function, name)
        with clean_state(spec):
            room.enter(job.number, job.timeout)
            # Not earlier, because objects that the freeze in there catches keep alive all objects they refer to.
            args, kwargs = pickle.loads(job.arguments)
            return pickle.dumps(("result", pickle.dumps(function(*args, **kwargs))))
    except BaseException as error:  # noqa: BLE001  (whatever a test raises, SystemExit too, is its answer)
        text = "".join(traceback.format_exception(error))
        return pickle.dumps(("raised", type(error).__name__, str(error), text))


def load_module(name: str, path: str) -> ModuleType:
    """Import the file `path` under the module's name in the tests, so that its classes can be pickled both ways."""
    if name in sys.modules:
        return sys.modules[name]
    spec = None
    with contextlib.suppress(ModuleNotFoundError):
        spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None or not Path(spec.origin).samefile(path):
        spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {path} as {name}")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextlib.contextmanager
def clean_state(spec: RankSpec) -> Iterator[None]:
    """A context for a job, with the settings of a new process."""
    reset_libraries(spec)
    environment = dict(os.environ)
    try:
        with warnings.catch_warnings():
            yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(spec.folder)


def reset_libraries(spec: RankSpec) -> None:
    """Reset process-wide settings that tests change."""
    import torch
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    seed()
    rank_zero_only.rank = spec.rank
    # A Trainer whose teardown raised leaves its handlers, and Lightning's next Trainer would call them, too.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored after Ctrl-C, and in a shell's background


def seed() -> None:
    """Seed the global generators: each test, and each job of a rank, draws the same numbers whatever ran before it."""
    import numpy as np
    import torch

    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


def make_tests_importable() -> None:
    """Let pickle find classes of any test module by pytest's name of the module, `tests.folder.module`.

    The folder that contains `tests` is not on sys.path, since the package's sources there would hide the installed one.
    """
    package = ModuleType("tests")
    package.__path__ = [str(Path(__file__).parents[1])]
    sys.modules["tests"] = package


if __name__ == "__main__":
    make_tests_importable()
    with socket.socket(fileno=int(sys.argv[1])) as server_end:
        serve(server_end)
