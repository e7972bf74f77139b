"""Simulates nodes on one machine by network namespaces, which veth links and a switch connect.

Each node has a host name, an address that all nodes resolve by this name, a loopback device, shared memory, and a
private folder with the same path on all nodes; they share everything else. The namespaces belong to a user namespace.
So they need no privileges if the system allows users to make one, and they disappear when the tests end.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

import pytest

from helpers import rank_worker, slow_links
from helpers.ranks import REPRODUCIBLE, ForkServer, RankPool, longest_wait

TOOLS = ("unshare", "nsenter", "mount", "ip")  # from util-linux and iproute2
NETWORK = "10.77.0"
DEVICE = "eth0"
# This process lives as long as the tests keep its standard input open.
HOLD = "import os, sys; print('ready', flush=True); os.execvp('cat', ['cat'])"
NAME = "import socket, sys; socket.sethostname(sys.argv[1])"


class UnavailableError(Exception):
    """Raised if namespaces cannot be made on this machine; the message says why."""


class Holder:
    """A process that keeps namespaces alive, and does nothing else unless a script is given."""

    def __init__(self, command: Sequence[str], kinds: Sequence[str], script: Sequence[str] = ("-c", HOLD)) -> None:
        self._process = subprocess.Popen(
            [*command, sys.executable, "-I", "-S", *script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        if self._process.stdout.readline() != "ready\n":
            raise UnavailableError(self._process.stderr.read().strip())
        self.pid = self._process.pid
        self.kinds = kinds

    @property
    def enter(self) -> list[str]:
        """The prefix of a command that is to run in these namespaces."""
        return ["nsenter", "--preserve-credentials", f"--target={self.pid}", *(f"--{kind}" for kind in self.kinds)]

    @property
    def namespaces(self) -> tuple[str, ...]:
        """The namespaces' files in the order to enter them; the user namespace, which permits the others, is first."""
        files = {"user": "user", "net": "net", "uts": "uts", "mount": "mnt"}
        return tuple(f"/proc/{self.pid}/ns/{files[kind]}" for kind in self.kinds)

    def run(self, *command: str) -> None:
        """Run a command in the namespaces.

        Raises:
            UnavailableError: the command failed, or is not installed.
        """
        if shutil.which(command[0]) is None:
            raise UnavailableError(f"not installed: {command[0]}")
        done = subprocess.run([*self.enter, *command], check=False, capture_output=True, text=True)
        if done.returncode:
            raise UnavailableError(f"{' '.join(command)}: {done.stderr.strip()}")

    def start(
        self, command: Sequence[str], folder: Path, environment: dict[str, str], output: Path
    ) -> subprocess.Popen[bytes]:
        """Start a command in the namespaces; its output, and that of its children, goes to the file `output`."""
        with output.open("wb") as log:
            return subprocess.Popen(
                [*self.enter, "env", f"--chdir={folder}", *command], env=environment, stdout=log, stderr=log
            )

    def close(self) -> None:
        self._process.communicate()


class Nodes:
    """`count` nodes, with a common folder `shared` and private folders `local`, both below `folder`."""

    def __init__(self, count: int, folder: Path) -> None:
        self.count = count
        self.shared, self.local = folder / "shared", folder / "local"
        self._folder = folder
        self._holders: list[Holder] = []
        if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
            raise UnavailableError(f"not installed: {', '.join(missing)}")
        self.shared.mkdir(parents=True)
        self.local.mkdir()
        names = [f"{NETWORK}.{number + 1} {self.name(number)}\n" for number in range(count)]
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(names))
        try:
            self._switch = self._make_switch()
            for number in range(count):
                self._holders.append(self._make_node(number))
        except UnavailableError:
            self.close()
            raise

    @staticmethod
    def name(number: int) -> str:
        return f"node{number}"

    def home(self, number: int) -> Path:
        """The path of a node's private folder outside the node."""
        return self._folder / self.name(number)

    def _make_switch(self) -> Holder:
        try:
            switch = Holder(["unshare", "--user", "--map-root-user", "--net", "--mount"], ["user", "net", "mount"])
        except UnavailableError as error:
            if os.geteuid() != 0:
                raise
            try:
                switch = Holder(["unshare", "--net", "--mount"], ["net", "mount"])
            except UnavailableError as again:
                raise UnavailableError(f"{error}; {again}") from None
        self._holders.append(switch)
        switch.run("ip", "link", "add", "switch", "type", "bridge")
        switch.run("ip", "link", "set", "switch", "up")
        return switch

    def _make_node(self, number: int) -> Holder:
        kinds = [*(kind for kind in self._switch.kinds if kind == "user"), "net", "uts", "mount"]
        node = Holder([*self._switch.enter, "unshare", "--net", "--uts", "--mount"], kinds)
        try:
            own = self.home(number)
            own.mkdir()
            node.run(sys.executable, "-I", "-S", "-c", NAME, self.name(number))
            node.run("mount", "--bind", str(self._folder / "hosts"), "/etc/hosts")
            node.run("mount", "--bind", str(own), str(self.local))
            node.run("mount", "-t", "tmpfs", "none", "/dev/shm")
            node.run("ip", "link", "set", "lo", "up")
            link = ["type", "veth", "peer", "name", DEVICE, "netns", str(node.pid)]
            self._switch.run("ip", "link", "add", f"port{number}", *link)
            self._switch.run("ip", "link", "set", f"port{number}", "master", "switch", "up")
            node.run("ip", "address", "add", f"{NETWORK}.{number + 1}/24", "dev", DEVICE)
            node.run("ip", "link", "set", DEVICE, "up")
        except UnavailableError:
            node.close()
            raise
        return node

    @property
    def nodes(self) -> list[Holder]:
        return self._holders[1:]

    def mend_links(self) -> None:
        """Undo the changes that ranks made to the links of their nodes."""
        for node in self.nodes:
            node.run("ip", "link", "set", DEVICE, "up")

    @contextlib.contextmanager
    def slow(self, delay: float, rate: float) -> Iterator[None]:
        """A context in which frames are delayed by `delay` seconds and nodes send at most `rate` bits per second."""
        ports = [f"port{number}" for number in range(self.count)]
        for port in ports:
            self._switch.run("ip", "link", "set", port, "nomaster")
        relay = Holder(self._switch.enter, (), [slow_links.__file__, str(delay), str(rate), *ports])
        try:
            yield
        finally:
            relay.close()
            for port in ports:
                self._switch.run("ip", "link", "set", port, "master", "switch")

    def close(self) -> None:
        for holder in reversed(self._holders):
            holder.close()
        self._holders.clear()


@contextlib.contextmanager
def joined(count: int, folder: Path) -> Iterator[Nodes]:
    """A context that yields nodes for a test; the test is skipped if they cannot be made."""
    try:
        nodes = Nodes(count, folder)
    except UnavailableError as error:
        pytest.skip(f"needs network namespaces: {error}")
    try:
        yield nodes
    finally:
        nodes.close()


class NodeRanks(RankPool):
    """A pool of ranks on nodes, with SLURM's variables and without a process group, which Lightning makes.

    Args:
        nodes: the nodes.
        per_node: number of ranks per node.
        server: the fork server of ranks without namespaces; the ranks are forked from it.
        count: number of nodes to use, the first ones; by default all.
    """

    grace = 60.0  # long, since after a failure the tests also check how the other ranks end

    def __init__(self, nodes: Nodes, per_node: int, server: ForkServer, count: int | None = None) -> None:
        self.nodes, self.per_node, self.count = nodes, per_node, count or nodes.count
        super().__init__(self.count * per_node, server, backend="")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _spec(self, rank: int, port: int) -> rank_worker.RankSpec:
        node, local = divmod(rank, self.per_node)
        names = f"node[0-{self.count - 1}]" if self.count > 1 else "node0"
        variables = REPRODUCIBLE | {
            "SLURM_JOB_ID": "4711",
            "SLURM_JOB_NAME": "training",
            "SLURM_JOB_NODELIST": names,
            "SLURM_NODELIST": names,
            "SLURM_NNODES": str(self.count),
            "SLURM_NODEID": str(node),
            "SLURM_NTASKS": str(self.world_size),
            "SLURM_NTASKS_PER_NODE": str(self.per_node),
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(local),
            "TMPDIR": str(self.nodes.local),
        }
        folder, limit = self._folder.name, longest_wait(self.timeout)
        namespaces = self.nodes.nodes[node].namespaces
        return rank_worker.RankSpec(rank, self.world_size, folder, port, limit, self._setup, "", namespaces, variables)
