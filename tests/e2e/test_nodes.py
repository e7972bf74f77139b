"""Training on several nodes: namespaces with an address, a name, a loopback device and a folder of their own."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.resuming import Global, SaveAfter
from e2e import train_restarting
from e2e.started import HERE, environment
from helpers import models
from helpers.nodes import DEVICE, NodeRanks, Nodes, joined
from helpers.ranks import ForkServer, RankError
from lightning import Trainer
from strategy.fits import (
    Lit,
    Recipe,
    StrategyArgument,
    assert_close,
    assert_same,
    make_trainer,
    reference,
    state_of,
)
from torch import Tensor, nn

from lightning_zero import CheckpointError

pytestmark = pytest.mark.slow

TIMEOUT = 20.0  # seconds that a rank waits for others; one may be late by 10, since it imports or its disk stands still
SECONDS_TO_LEAVE = 1.0  # in which all ranks leave a collective, once one has
MARGIN = 60.0  # more, after which every rank must have ended, on a busy machine too
LAUNCH = 400.0  # seconds of a real launch, most of which are imports
DELAY, RATE = 1e-3, 100e6  # of a slow link: seconds; bits in a second
SEGMENT = 1600  # bytes on a link, at most
OVERHEAD = 1.15  # bytes on a link for each that a rank sends: headers and acknowledgements, and the norm's sum


class Large(Recipe):
    """A model whose gradients are nearly all that goes over a link."""

    def make_model(self) -> nn.Module:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(self.seed)
            return models.MLP(301, 401).to(self.dtype)


LARGE = Large(optimizer="momentum", steps=4)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with joined(3, tmp_path_factory.mktemp("nodes")) as made:
        yield made


def trainer_on_nodes(strategy: StrategyArgument, **flags: Any) -> Trainer:
    """As a user writes it for a job of SLURM: Lightning makes the process group."""
    flags |= {"devices": int(os.environ["SLURM_NTASKS_PER_NODE"]), "num_nodes": int(os.environ["SLURM_NNODES"])}
    return make_trainer(strategy, **flags)


# ------------------------------------------------------------------------------------------------------------- traffic


def bytes_on_link() -> int:
    """How many this node has sent to others."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        device, _, counts = line.partition(":")
        if device.strip() == DEVICE:
            return int(counts.split()[8])
    raise LookupError(DEVICE)


def sent_again() -> int:
    """How many segments this node has sent once more: on a busy machine an acknowledgement may be late."""
    names, counts = (line.split() for line in Path("/proc/self/net/snmp").read_text().splitlines() if "Tcp:" in line)
    return int(counts[names.index("RetransSegs")])


def round_trip(node: str, enough: float) -> float:
    """The seconds in which a node refuses a connection; the least of some, or one that is short enough."""
    least = float("inf")
    for number in itertools.count(1):
        start = time.monotonic()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((node, 9))
        least = min(least, time.monotonic() - start)
        if (number >= 20 and least < enough) or number == 1000:
            return least
    raise AssertionError


class Counts(Lit):
    """Notes what its rank, and what its node's link, had sent before the first step and after the last."""

    def on_train_batch_start(self, batch: Tensor, index: int) -> None:
        if index == 1:  # ranks have met
            self.note()

    def on_train_end(self) -> None:
        self.note()

    def note(self) -> None:
        self.trainer.strategy.barrier()
        mesh = self.trainer.strategy._mesh
        sent = {name: dict(getattr(mesh, name).sent) for name in ("shard", "replica")}
        self.notes.append({"link": bytes_on_link(), "again": sent_again(), "time": time.monotonic(), **sent})
        self.trainer.strategy.barrier()


@dataclasses.dataclass(frozen=True)
class Counted:
    """What one rank saw of a fit."""

    host: str
    weights: dict[str, Tensor]
    before: dict[str, Any]
    after: dict[str, Any]

    def sent(self, group: str) -> dict[str, int]:
        """Bytes by collective."""
        return {name: n - self.before[group].get(name, 0) for name, n in self.after[group].items()}

    @property
    def on_link(self) -> int:
        return self.after["link"] - self.before["link"]

    @property
    def again(self) -> int:
        """At most so many bytes of them had been sent before."""
        return SEGMENT * (self.after["again"] - self.before["again"])

    @property
    def seconds(self) -> float:
        return self.after["time"] - self.before["time"]


def count(*strategies: StrategyArgument) -> list[Counted]:
    found = []
    for strategy in strategies:
        trainer, lit = trainer_on_nodes(strategy), Counts(LARGE)
        trainer.fit(lit)
        found.append(Counted(socket.gethostname(), state_of(trainer), *lit.notes))
    return found


@pytest.mark.parametrize(("number", "slow"), [(2, False), (3, True)], ids=["two nodes", "three nodes, slow links"])
def test_nodes_exchange_nothing_but_sums_of_gradient_shards(
    nodes: Nodes, fork_server: ForkServer, number: int, slow: bool
) -> None:
    """With tasks of SLURM. The links' own counters agree, and slow ones change no bit."""
    strategies = ("zero2", "zero3")
    with contextlib.ExitStack() as stack:
        if slow:
            stack.enter_context(nodes.slow(DELAY, RATE))
        pool = stack.enter_context(NodeRanks(nodes, 2, fork_server, number))
        assert (pool.run(round_trip, "node1", 2 * DELAY)[0] > 2 * DELAY) == slow
        ranks = pool.run(count, *strategies)
    gradient = sum(p.nbytes for p in LARGE.make_model().parameters())
    crossing = (LARGE.steps - 1) * gradient * 2 * (number - 1) / number  # of each node
    for index, strategy in enumerate(strategies):
        expected = reference(strategy, LARGE, 2 * number, shard_size=2).weights
        found = [each[index] for each in ranks]
        assert [each.host for each in found] == [nodes.name(node) for node in range(number) for _ in range(2)]
        assert_same(found[0].weights, expected)
        for each in found:
            assert each.sent("shard")["reduce_scatter"] > 0
            assert {name for name, sent in each.sent("replica").items() if sent} == {"all_reduce"}
            assert each.sent("replica")["all_reduce"] == pytest.approx(crossing / 2, rel=0.01)
            assert crossing <= each.on_link <= OVERHEAD * crossing + each.again
            assert not slow or each.seconds > 8 * crossing / RATE


# ----------------------------------------------------------------------------------------------------- a node goes away


class GoesAway(Lit):
    """In the second step a node's ranks are killed, or its link breaks."""

    node, how, note = "", "", Path()

    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        if index == 1:
            # Other ranks may still be in Lightning's broadcast before the batch, whose errors tell less.
            self.trainer.strategy.barrier()
            time.sleep(SECONDS_TO_LEAVE)
            if socket.gethostname() == self.node:
                self.go_away()
        return super().training_step(batch, index)

    def go_away(self) -> None:
        self.note.touch()
        if self.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.trainer.local_rank == 0:
            subprocess.run(["ip", "link", "set", DEVICE, "down"], check=True)


def fit_until(node: str, how: str, note: Path) -> None:
    lit = GoesAway(Recipe())
    lit.node, lit.how, lit.note = node, how, note
    trainer_on_nodes({"stage": 2, "timeout": TIMEOUT}).fit(lit)


@pytest.mark.parametrize(
    ("node", "how", "said"),
    [
        ("node1", "killed", {0: "because rank 2 on node1 has ended", 1: "because rank 3 on node1 has ended"}),
        # Rank 1's end may be seen before rank 0 has ended, and the store with it.
        ("node0", "killed", {2: "because rank 0 on node0 has ended", 3: "because rank [01] on node0 has ended"}),
        (
            "node1",
            "cut",
            # One may see the other's connections close, once that has waited long enough.
            {0: "(rank 2 on node1|another rank) failed, or", 1: "(rank 3 on node1|another rank) failed, or"}
            | dict.fromkeys((2, 3), "because the store of rank 0 on node0 does not answer: that node, or the network"),
        ),
    ],
    ids=["killed", "node of rank 0 killed", "link down"],
)
def test_ranks_end_soon_and_name_a_node_that_went_away(
    nodes: Nodes, fork_server: ForkServer, tmp_path: Path, node: str, how: str, said: dict[int, str]
) -> None:
    """Where a link is down, the ranks on either side of it do."""
    note = tmp_path / "note"
    try:
        with NodeRanks(nodes, 2, fork_server, 2) as pool, pytest.raises(RankError) as caught:
            pool.run(fit_until, node, how, note)
        assert time.time() - note.stat().st_mtime < TIMEOUT + MARGIN
    finally:
        nodes.mend_links()
    failures = caught.value.failures
    assert sorted(failures) == [0, 1, 2, 3]
    for rank, failure in failures.items():
        if rank not in said:
            assert failure.kind == "died"
            continue
        assert failure.kind == "CollectiveError"
        # Of a node that is cut off, either rank may be the first whose time is up.
        assert re.match(
            rf"rank {rank} of 4 on node{rank // 2} could not (sum|reduce) the gradients of ", failure.message
        )
        assert re.search(said[rank], failure.message)
    if how == "cut":  # whoever is first has nobody else to name
        messages = [failures[rank].message for rank in (0, 1)]
        assert any(f"rank {rank + 2} on node1 failed, or" in messages[rank] for rank in (0, 1)), messages


# --------------------------------------------------------------------------------------------------------- checkpoints

EXACT = Recipe(steps=4, dtype=torch.float64)
IN_FILE = {"stage": 3, "persistence_numel": 0}
IN_FOLDER = IN_FILE | {"checkpoint_format": "sharded"}


def train(strategy: StrategyArgument, steps: int, *, resume: Path | None = None, save: Path | None = None) -> Any:
    """The weights after so many steps in all; saves after the second."""
    callbacks = [SaveAfter(2, str(save))] if save else []
    flags = {"max_epochs": -1, "max_steps": steps, "precision": "64-true", "callbacks": callbacks}
    trainer = trainer_on_nodes(strategy, **flags)
    trainer.fit(Global(EXACT), ckpt_path=None if resume is None else str(resume))
    return state_of(trainer)


def save_everywhere(shared: Path, local: Path) -> list[dict[str, Tensor]]:
    """The weights of runs that save in folders and files, of which all nodes or each alone has one."""
    runs = [(IN_FILE, shared / "one.ckpt"), (IN_FOLDER, shared / "parts.ckpt")]
    runs += [(IN_FILE, local / "one.ckpt"), (IN_FOLDER, local / "parts.ckpt")]
    weights = [train(strategy, 4, save=path) for strategy, path in runs]
    with pytest.raises(CheckpointError, match=r"__\d_0_\w+.distcp is missing. If each node has written a folder"):
        train(IN_FOLDER, 4, resume=local / "parts.ckpt")
    return weights


def resume_all(*paths: Path) -> list[dict[str, Tensor]]:
    return [train(IN_FOLDER, 4, resume=path) for path in paths]


def test_checkpoints_with_and_without_a_shared_folder_resume_on_other_nodes(
    nodes: Nodes, fork_server: ForkServer
) -> None:
    """Two nodes of two ranks save; one node resumes, and two whose folders have got all files."""
    shared, local, homes = nodes.shared, nodes.local, [nodes.home(number) for number in range(2)]
    with NodeRanks(nodes, 2, fork_server, 2) as pool:
        uninterrupted, *others = pool.run(save_everywhere, shared, local)[0]
    for other in others:
        assert_same(other, uninterrupted)
    assert (homes[0] / "one.ckpt").is_file()  # gathered by rank 0
    assert not (homes[1] / "one.ckpt").exists()
    for home, other in (homes, homes[::-1]):
        for part in (other / "parts.ckpt").glob("*.distcp"):
            shutil.copy(part, home / "parts.ckpt" / part.name)
    paths = (shared / "one.ckpt", shared / "parts.ckpt", local / "parts.ckpt")
    with NodeRanks(nodes, 2, fork_server, 1) as pool:  # of node0, which has the file, too
        for weights in pool.run(resume_all, *paths, local / "one.ckpt")[0]:
            assert_close(weights, uninterrupted)
    with NodeRanks(nodes, 2, fork_server, 2) as pool:
        for weights in pool.run(resume_all, *paths)[0]:
            assert_same(weights, uninterrupted)


# ------------------------------------------------------------------------------------------------------------ torchrun


# Without it the ranks of all restarts share one store, in which they find the addresses of those before them (torch
# 2.13).
FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@pytest.mark.launch
def test_torchrun_restarts_from_the_last_checkpoint_when_a_node_is_killed(nodes: Nodes) -> None:
    """The weights are those of an undisturbed run, bit for bit."""
    folder = nodes.shared / "restarting"
    folder.mkdir()
    options = json.dumps({"folder": str(folder), "fail_on": "node1"})
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1", "--max-restarts=3"]
    rendezvous = ["--rdzv-backend=c10d", "--rdzv-endpoint=node0:29400", "--rdzv-id=job"]
    command = [*launcher, *rendezvous, str(HERE / "train_restarting.py"), options]
    variables = environment() | FRESH_STORE
    variables.pop("GLOO_SOCKET_IFNAME", None)  # the loopback device does not reach another node
    outputs = [folder / f"{nodes.name(number)}.log" for number in range(2)]
    started = [nodes.nodes[number].start(command, folder, variables, outputs[number]) for number in range(2)]
    try:
        deadline = time.monotonic() + LAUNCH
        for agent in started:
            agent.wait(timeout=deadline - time.monotonic())
    finally:
        for agent, output in zip(started, outputs, strict=True):
            agent.terminate()  # with its ranks, which are in sessions of their own
            agent.wait(timeout=240.0)
            print(output.read_text())
    assert [agent.returncode for agent in started] == [0, 0]
    assert "because rank 1 on node1 has ended without a Python error: it was killed" in outputs[0].read_text()
    assert f"Restored all states from the checkpoint at {folder}/last.ckpt" in outputs[0].read_text()
    weights = torch.load(folder / "weights.pt", weights_only=True)
    assert_same(weights, reference("zero3", train_restarting.RECIPE, 2).weights)
