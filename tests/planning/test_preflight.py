"""A fit that cannot fit into memory ends before it takes any, on all ranks, and says what would fit."""

from __future__ import annotations

import functools
import re
import resource
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from engine import driver
from helpers.ranks import RankPool, ranks
from strategy.fits import make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero.integration.names import STRATEGIES
from lightning_zero.integration.preflight import DoesNotFitError
from lightning_zero.planning import preflight
from lightning_zero.planning.account import Peak
from lightning_zero.planning.memory import held_by
from lightning_zero.planning.preflight import Claim, Pool, Shortage, claims, shortages, with_plan
from lightning_zero.sharding import Mesh

MIB = 2**20
WIDTH = 256
CPU = torch.device("cpu")


class Blocks(L.LightningModule):
    """Six MiB of parameters in blocks."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.width = width
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(24))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(2, self.width), batch_size=1)


def write_machine(root: Path, memory: int, limit: int | None, resident: int = 0) -> Path:
    """A machine's `/proc` and `/sys`; sizes in bytes, multiples of a KiB."""
    files = {
        "proc/meminfo": f"MemTotal: {memory >> 10} kB\nSwapTotal: 0 kB\n",
        "proc/self/status": f"Name: python\nRssAnon: {resident >> 10} kB\nRssShmem: 0 kB\n",
        "proc/self/cgroup": "0::/job\n",
        "sys/fs/cgroup/job/memory.max": "max" if limit is None else str(limit),
        "proc/sys/kernel/random/boot_id": "one\n",
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@contextmanager
def machine(root: Path) -> Iterator[None]:
    with mock.patch.object(preflight, "claims", functools.partial(claims, root=root)):
        yield


def of(found: list[Claim], name: str) -> Claim:
    (claim,) = (claim for claim in found if name in claim.pool.name)
    return claim


def test_what_a_process_has_and_uses(tmp_path: Path) -> None:
    """The module is in the plan, so it is not used; the limit of a container counts beside the machine's memory."""
    model = nn.Linear(512, 1024, bias=False)  # 2 MiB
    found = claims(model, None, CPU, 3, write_machine(tmp_path, 64 * MIB, 16 * MIB, resident=5 * MIB))
    for name, total in (("machine", 64 * MIB), ("container", 16 * MIB)):
        claim = of(found, name)
        assert (claim.rank, claim.pool.total, claim.used, claim.wanted) == (3, total, 3 * MIB, 0)
    # On CPU device and host are one memory; the plan's peak of both together is what counts.
    wanted = {claim.wanted for claim in with_plan(found, Peak(5, 6, 7), CPU)}
    assert wanted == {7}


@pytest.mark.parametrize(
    ("files", "swap"),
    [
        ({}, 64),
        ({"job/memory.swap.max": 0}, 0),
        ({"job/memory.swap.max": "max", "memory.swap.max": 8 * MIB}, 8),
        ({"job/memory.swap.max": 128 * MIB}, 64),
        ({"job/memory.memsw.limit_in_bytes": 20 * MIB, "memory.memsw.limit_in_bytes": 40 * MIB}, 4),
        ({"job/memory.memsw.limit_in_bytes": 2**63 - 4096}, 64),
    ],
)
def test_swap_counts_as_far_as_a_container_may_use_it(tmp_path: Path, files: dict[str, Any], swap: int) -> None:
    """Version 1 limits memory and swap together."""
    root = write_machine(tmp_path, 64 * MIB, 16 * MIB)
    (root / "proc/meminfo").write_text(f"MemTotal: {64 << 10} kB\nSwapTotal: {64 << 10} kB\n")
    for name, limit in files.items():
        (root / "sys/fs/cgroup" / name).write_text(str(limit))
    found = claims(nn.Linear(1, 1), None, CPU, 0, root)
    assert of(found, "container").pool.total == (16 + swap) * MIB
    assert of(found, "machine").pool.total == (64 + swap) * MIB


def test_memory_that_forked_ranks_share_counts_once(tmp_path: Path) -> None:
    """That of the process that has started them, in which the module is, too."""
    root, model = write_machine(tmp_path, 64 * MIB, None, resident=16 * MIB), nn.Linear(512, 1024, bias=False)
    for divided, used in ((5 * MIB, 5 * MIB), (16 * MIB, 14 * MIB)):
        (root / "proc/self/smaps_rollup").write_text(f"Rss: 9999 kB\nPss_Anon: {divided >> 10} kB\nPss_Shmem: 0 kB\n")
        assert of(claims(model, None, CPU, 0, root), "machine").used == used


def test_ranks_share_a_limit_where_they_are_in_one_group(tmp_path: Path) -> None:
    """Not those of two containers, whose paths version 1 does not show below the mount; nor those of two machines."""
    root = write_machine(tmp_path, 64 * MIB, None)
    limit = root / "sys/fs/cgroup/memory/memory.limit_in_bytes"
    limit.parent.mkdir()
    limit.write_text(str(16 * MIB))
    for step in ("a", "b"):
        (limit.parent / "job" / step).mkdir(parents=True)

    def key_of(group: str) -> str:
        (root / "proc/self/cgroup").write_text(f"4:memory:{group}\n")
        return of(claims(nn.Linear(1, 1), None, CPU, 0, root), "container").pool.key

    assert key_of("/job/a") == key_of("/job/b")
    assert key_of("/docker/one") == key_of("/docker/one") != key_of("/docker/two")
    (root / "proc/sys/kernel/random/boot_id").unlink()
    keys = []
    for host in ("node0", "node1"):
        with mock.patch("socket.gethostname", return_value=host):
            keys.append(of(claims(nn.Linear(1, 1), None, CPU, 0, root), "machine").pool.key)
    assert keys[0] != keys[1]


def test_an_average_of_an_earlier_fit_is_in_use(tmp_path: Path) -> None:
    """The plan of the next fit includes the engine's memory and the averages that this fit makes."""
    root, model = write_machine(tmp_path, 64 * MIB, None, resident=16 * MIB), nn.Linear(512, 1024, bias=False)
    engine = driver.make_engine(model, driver.Setup(1), Mesh.single())
    used = of(claims(model, engine, CPU, 0, root), "machine").used
    average = engine.make_shadow()
    assert of(claims(model, engine, CPU, 0, root), "machine").used == used
    assert held_by(engine)["averages"].total == 2 * MIB == sum(shard.nbytes for shard in average.shards)


def test_ranks_that_share_memory_share_the_limit() -> None:
    machine, first, second = (Pool(key, key, "host", 10) for key in ("machine", "first", "second"))
    found = [Claim(0, machine, 1, 4), Claim(0, first, 0, 8), Claim(1, machine, 1, 4), Claim(1, second, 0, 11)]
    assert [(s.pool.key, s.ranks) for s in shortages(found)] == [("second", (1,))]
    found[2] = Claim(1, machine, 2, 4)
    assert shortages(found)[0] == Shortage(machine, (0, 1), used=3, wanted=8)


def test_a_limit_of_locked_memory_counts_where_the_driver_heeds_it() -> None:
    class Driver:
        def __init__(self, most: int) -> None:
            self.most = most

        def pin(self, address: int, nbytes: int) -> None:
            if nbytes > self.most:
                raise RuntimeError("no")

        def unpin(self, address: int) -> None: ...

    for most, holds in ((1 << 16, True), (1 << 30, False)):
        with mock.patch.object(preflight, "device_type", lambda _, most=most: Driver(most)):
            assert preflight.lock_limit_holds(CPU, 1 << 16) is holds


def fit(root: Path, name: str, option: str) -> tuple[str, int]:
    """What a fit said, as an error or a warning, and the steps that it made."""
    trainer = make_trainer({**STRATEGIES[name], "preflight": option})
    with machine(root), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            trainer.fit(Blocks())
        except DoesNotFitError as error:
            return str(error), trainer.global_step
    return "\n".join(str(w.message) for w in warned if "more memory than" in str(w.message)), trainer.global_step


@ranks(2)
def test_what_does_not_fit_ends_with_a_table_of_what_does(pool: RankPool, tmp_path: Path) -> None:
    # Both ranks use 1 MiB; the parameters are 6 MiB: zero2 takes more than what is left, zero3 less.
    root = write_machine(tmp_path, 4096 * MIB, 52 * MIB, resident=7 * MIB)
    (first, steps), (second, others) = pool.run(fit, root, "zero0", "error")
    assert (steps, others) == (0, 0)
    assert first == second
    reason = re.search(r"container\) has 52 MiB: ranks 0 to 1 take \d+ MiB beside 2 MiB", first)
    assert reason, first
    assert "the machine's memory" not in first
    offered = re.findall(r"│ strategy=(\w+) ", first)
    print(first)
    assert "zero3" in offered
    assert "zero1" not in offered
    # What is offered runs, and what is not offered does not.
    for name in ("zero3", "zero1"):
        (said, steps), _ = pool.run(fit, root, name, "error")
        assert (not said, steps) == ((True, 2) if name in offered else (False, 0)), said
    (said, steps), (other, _) = pool.run(fit, root, "zero0", "warn")
    assert "container" in said
    assert not other  # rank 0 warns
    assert steps == 2
    assert pool.run(fit, root, "zero0", "off") == [("", 2)] * 2


def fit_with_little_address_space(room: int) -> tuple[str, bool]:
    """What a fit said that lacks memory for its state, and whether one with room for that was planned."""
    model, planned = Blocks(1024), []  # 96 MiB of parameters, twice that of state

    class Look(L.Callback):
        def on_train_start(self, trainer: Any, pl_module: L.LightningModule) -> None:
            planned.append("plan" in vars(trainer.strategy.memory))

    size = preflight.limits.process_memory()["VmSize"]
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + room, hard))
    try:
        make_trainer("zero2").fit(model)
    except DoesNotFitError as error:
        return str(error), False
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        make_trainer("zero2", callbacks=[Look()]).fit(model)
    return "", planned[0]


@pytest.mark.slow
@ranks(1)
def test_a_limit_of_the_address_space_is_found_before_it_is_reached(pool: RankPool) -> None:
    ((said, planned),) = pool.run(fit_with_little_address_space, 160 * MIB)
    assert re.search(r"address space of a process .* has \S+ \w+: rank 0 takes \d+ MiB beside", said), said
    assert not planned  # where memory is ample, nothing is
