"""Compares saving and loading AdamW's state on two CPU ranks by this package, DDP, FSDP2 and DeepSpeed.

    python -m benchmarks.checkpoint
    python -m benchmarks.checkpoint --parameters 1e6 --rounds 2 --folder /path/on/the/disk

All contestants hold the same model, after one step, in the same two processes (gloo). In every round each contestant
saves, loads from the page cache and, after `posix_fadvise(DONTNEED)` on its files, loads from the disk. The order of
the contestants is random in every round, since one contestant's writes may slow the disk down for the next. The time is
that of the slower rank: for a save, until everything is on the disk; for a load, until both ranks have their weights
and optimizer state. Before each load the state is filled with zeros, and freed memory is returned to the system, since
a process that resumes has no freed memory either. Afterwards the sums of the state must be the same as before.

- ddp: Lightning's `ddp`, one file that rank 0 writes; every rank reads all of it.
- fsdp2: `fully_shard` of every layer, `get_state_dict` and `torch.distributed.checkpoint`.
- deepspeed: `save_checkpoint` and `load_checkpoint` of its engine, ZeRO stage 2.
- ours: `full`, one file, and `sharded`, a folder, with and without checksums, which are written and verified. (Peers
  write the checksums of `torch.save`, but verify none.) For `async` the time until training continues is measured too.
- raw: both ranks write and read plain bytes, one half of the size of the state each, as a measure of the disk's speed.

Peers do not flush everything that they write (`fsdp2` flushes its files, but no folder). So `fsync` of all their files
and folders is added to the save. DeepSpeed is skipped if it is not installed.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import importlib.util
import json
import os
import random
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from benchmarks.environment import describe, free_port
from lightning_zero import ZeroStrategy

ROOT = Path(__file__).parents[1]
RANKS, TOKENS = 2, 8
GOAL = 1.05  # the goal, without checksums: at most this factor times the time of the fastest peer
TILE = 1 << 23  # bytes that `raw` reads and writes at a time
PEERS = ("ddp", "fsdp2", "deepspeed")


class Size(NamedTuple):
    """The size of the model: about this number of parameters in total, in this number of layers."""

    parameters: float
    layers: int


class Model(pl.LightningModule):
    """Transformer layers, each with 12 tensors."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        torch.manual_seed(0)
        width = 16 * round((size.parameters / size.layers / 12) ** 0.5 / 16)
        self.width = width
        self.layers = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(width, 1, 4 * width, dropout=0.0, batch_first=True)
                for _ in range(size.layers)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self(batch)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader([self.batch()[0]])  # type: ignore[arg-type]  # a list is a data set

    def batch(self) -> Tensor:
        return torch.ones(1, TOKENS, self.width)

    def configure_optimizers(self) -> torch.optim.AdamW:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Contestant:
    """One way to save and load, on one rank.

    Attributes:
        name: unique name.
        loads: whether its load is measured.
    """

    name: str
    loads = True

    def save(self, folder: Path) -> None:
        """Save into the empty ``folder``; an asynchronous save may return before :meth:`finish` must be called."""
        raise NotImplementedError

    def finish(self) -> None:
        """Wait until an asynchronous save is on the disk."""

    def load(self, folder: Path) -> None:
        """Restore the state from ``folder``."""
        raise NotImplementedError

    def state(self) -> list[Tensor]:
        """The tensors with this rank's weights and optimizer state themselves, not copies."""
        raise NotImplementedError


class Lightning(Contestant):
    """A Trainer that has taken a step; it saves and restores by its own methods."""

    def __init__(self, name: str, size: Size, strategy: str | Strategy) -> None:
        self.name = name
        self.trainer = pl.Trainer(
            accelerator="cpu",
            devices=RANKS,
            strategy=strategy,
            max_steps=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        self.trainer.fit(Model(size))
        for parameter in self.trainer.lightning_module.parameters():
            parameter.grad = None

    def save(self, folder: Path) -> None:
        self.trainer.save_checkpoint(folder / "last.ckpt", weights_only=False)

    def load(self, folder: Path) -> None:
        strategy = self.trainer.strategy
        checkpoint = strategy.load_checkpoint(folder / "last.ckpt", weights_only=True)
        strategy.load_model_state_dict(checkpoint)
        strategy.load_optimizer_state_dict(checkpoint)

    def state(self) -> list[Tensor]:
        (optimizer,) = self.trainer.optimizers
        return [*self.trainer.lightning_module.parameters(), *_tensors(optimizer)]


class DDP(Lightning):
    def save(self, folder: Path) -> None:
        super().save(folder)
        flush(folder)


class Ours(Lightning):
    """One container of this package; all containers share one Trainer and strategy."""

    def __init__(self, shared: Lightning, container: str, checksums: bool = True, in_background: bool = False) -> None:
        kind = "async" if in_background else "checksums" if checksums else "no checksums"
        self.name, self.loads = f"{shared.name} {container}, {kind}", not in_background
        self.trainer = shared.trainer
        self._container, self._checksums, self._in_background = container, checksums, in_background

    @property
    def strategy(self) -> ZeroStrategy:
        assert isinstance(self.trainer.strategy, ZeroStrategy)
        return self.trainer.strategy

    def save(self, folder: Path) -> None:
        self.strategy._options = replace(
            self.strategy.options, checkpoint_format=self._container, checksums=self._checksums
        )
        # Saves outside `fit` are never asynchronous.
        self.trainer.strategy._fitting = self._in_background  # only saves during a fit are
        super().save(folder)

    def finish(self) -> None:
        assert self.strategy._background is not None
        self.strategy._background.wait()

    def load(self, folder: Path) -> None:
        self.strategy._options = replace(self.strategy.options, checksums=self._checksums)
        super().load(folder)

    def state(self) -> list[Tensor]:
        engine = self.strategy.engine
        values = [bucket.master.read(0, bucket.layout.shard_numel) for bucket in engine.buckets]
        for updater in engine.updaters:
            values += [f.view(0, f.numel) for bucket in engine.buckets for f in updater.state_of(bucket).flat.values()]
        whole = [p for bucket in engine.buckets if not bucket.shards_params for p in bucket.parameters]
        return [*values, *whole]


class FSDP2(Contestant):
    name = "fsdp2"

    def __init__(self, size: Size) -> None:
        self.model = Model(size)
        for layer in self.model.layers:
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = self.model.configure_optimizers()
        self.model(self.model.batch()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, folder: Path) -> None:
        dcp.save(self._state_dict(), storage_writer=dcp.FileSystemWriter(folder, sync_files=True))
        flush(folder)

    def load(self, folder: Path) -> None:
        state = self._state_dict()
        dcp.load(state, storage_reader=dcp.FileSystemReader(folder))
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def _state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def state(self) -> list[Tensor]:
        return [_local(value) for value in (*self.model.parameters(), *_tensors(self.optimizer))]


class DeepSpeed(Contestant):
    name = "deepspeed"

    def __init__(self, size: Size) -> None:
        import deepspeed

        deepspeed.init_distributed("gloo", dist_init_required=False)
        model = Model(size)
        self.engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=model.configure_optimizers(),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "zero_optimization": {"stage": 2},
                "zero_allow_untested_optimizer": True,
            },
        )
        self.engine.backward(self.engine(model.batch()))
        self.engine.step()

    def save(self, folder: Path) -> None:
        self.engine.save_checkpoint(str(folder), tag="last")
        flush(folder)

    def load(self, folder: Path) -> None:
        self.engine.load_checkpoint(str(folder), tag="last")

    def state(self) -> list[Tensor]:
        optimizer = self.engine.optimizer
        shards = optimizer.single_partition_of_fp32_groups
        return [*self.engine.module.parameters(), *shards, *_tensors(optimizer.optimizer)]


class Raw(Contestant):
    name = "raw"

    def __init__(self, parameters: int) -> None:
        self._values = torch.ones(3 * parameters // RANKS)

    def save(self, folder: Path) -> None:
        self._transfer(folder, os.O_WRONLY | os.O_CREAT, os.writev)

    def load(self, folder: Path) -> None:
        self._transfer(folder, os.O_RDONLY, os.readv)

    def _transfer(self, folder: Path, flags: int, transfer: Callable[[int, Sequence[Any]], int]) -> None:
        data, done = self._values.numpy().data.cast("B"), 0
        file = os.open(folder / f"rank{dist.get_rank()}", flags)
        try:
            while done < len(data):
                done += transfer(file, [data[done : done + TILE]])
            if flags & os.O_WRONLY:
                os.fsync(file)
        finally:
            os.close(file)

    def state(self) -> list[Tensor]:
        return [self._values]


def _tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The tensors of its state that have one value per element."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return [value for value in values if isinstance(value, Tensor) and value.dim()]


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def flush(folder: Path) -> None:
    """Flush all files and folders below ``folder`` to the disk; each rank flushes a part. Collective."""
    dist.barrier()  # other ranks may still be writing
    paths = sorted([folder, *folder.rglob("*")])
    for path in paths[dist.get_rank() :: RANKS]:
        with _opened(path) as file:
            os.fsync(file)


def forget(folder: Path) -> None:
    """Drop the files below ``folder``, which must be on the disk, from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with _opened(path) as file:
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def free_memory() -> None:
    """Return memory that this process has freed to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    file = os.open(path, os.O_RDONLY)
    try:
        yield file
    finally:
        os.close(file)


def field(size: Size, strategies: Iterable[str]) -> Iterator[Contestant]:
    """All contestants, each with its state."""
    yield Raw(sum(p.numel() for p in Model(size).parameters()))
    yield DDP("ddp", size, "ddp")
    yield FSDP2(size)
    if importlib.util.find_spec("deepspeed"):
        yield DeepSpeed(size)
    for name in strategies:
        shared = Lightning(name, size, ZeroStrategy(stage=int(name[-1]), async_save=True))
        for container in ("full", "sharded"):
            yield Ours(shared, container)
            yield Ours(shared, container, checksums=False)
            yield Ours(shared, container, in_background=True)


def measure(contestant: Contestant, parent: Path) -> dict[str, float]:
    """Save and load once in an empty folder inside ``parent``, and return seconds. Collective.

    Raises:
        RuntimeError: this rank's state has changed.
    """
    rank, folder = dist.get_rank(), parent / "checkpoint"
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        os.sync()  # so that removals and writes of other contestants are not measured
    seconds = {}
    dist.barrier()
    start = time.perf_counter()
    contestant.save(folder)
    dist.barrier()
    if isinstance(contestant, Ours) and not contestant.loads:
        seconds["until training goes on"] = time.perf_counter() - start
    contestant.finish()
    dist.barrier()
    seconds["save"] = time.perf_counter() - start
    if contestant.loads:
        before = sums(contestant)
        for cache in ("warm", "cold"):
            for values in contestant.state():
                values.detach().zero_()
            if cache == "cold" and rank == 0:
                forget(folder)
            free_memory()
            dist.barrier()
            start = time.perf_counter()
            contestant.load(folder)
            dist.barrier()
            seconds[f"load, {cache}"] = time.perf_counter() - start
            if sums(contestant) != before:
                raise RuntimeError(f"{contestant.name} has not loaded what it saved")
    return seconds


def sums(contestant: Contestant) -> list[float]:
    return [values.detach().sum(dtype=torch.float64).item() for values in contestant.state()]


def work(rank: int, port: int, options: argparse.Namespace, parent: Path) -> None:
    """The program of each rank; rank 0 writes the seconds to a file in ``parent``."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "NODE_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu"}
    warnings.filterwarnings("ignore")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // RANKS))
    dist.init_process_group("gloo")
    contestants = list(field(Size(options.parameters, options.layers), options.strategies))
    seconds: dict[str, dict[str, list[float]]] = {contestant.name: {} for contestant in contestants}
    order = random.Random(0)  # the same on all ranks
    for number in range(-1, options.rounds):  # the first one is for warm-up
        for contestant in order.sample(contestants, len(contestants)):
            for what, taken in measure(contestant, parent).items():
                if number >= 0:
                    seconds[contestant.name].setdefault(what, []).append(taken)
        if rank == 0:
            (parent / "seconds.json").write_text(json.dumps(seconds))
    dist.destroy_process_group()


def summary(seconds: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, dict[str, float]]]:
    """By measurement and contestant: median and minimum in seconds, and their ratios to those of the fastest peer."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for what in dict.fromkeys(what for times in seconds.values() for what in times):
        of = {name: times[what] for name, times in seconds.items() if what in times}
        peers = [of[name] for name in PEERS if name in of]
        found[what] = {}
        for name, times in of.items():
            row = found[what][name] = {"median": median(times), "min": min(times)}
            if peers:
                row["to_best_peer"] = row["median"] / min(map(median, peers))
                row["to_best_peer_min"] = row["min"] / min(map(min, peers))
    return found


def criterion(found: dict[str, dict[str, dict[str, float]]]) -> dict[str, bool]:
    """For each container without checksums, whether it takes at most :data:`GOAL` times as long as the fastest peer."""
    return {
        f"{name}: {what}": row["to_best_peer"] <= GOAL
        for what, rows in found.items()
        for name, row in rows.items()
        if name.endswith("no checksums") and "to_best_peer" in row
    }


def table(found: dict[str, dict[str, dict[str, float]]]) -> str:
    """Seconds and ratios as a Markdown table."""
    lines = ["| what | who | median, s | min, s | to the best peer | of minima |", "|---|---|---|---|---|---|"]
    for what, rows in found.items():
        for name, row in rows.items():
            ratios = [f"{row[key]:.2f}" if key in row else "" for key in ("to_best_peer", "to_best_peer_min")]
            cells = [what, name, f"{row['median']:.3f}", f"{row['min']:.3f}", *ratios]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def file_system(path: Path) -> str:
    """The type and the device of the file system that contains ``path``."""
    mounts = [line.split()[:3] for line in Path("/proc/mounts").read_text().splitlines()]
    device, _, kind = max((m for m in mounts if path.resolve().is_relative_to(m[1])), key=lambda mount: len(mount[1]))
    return f"{kind} on {device}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=1e8, help="of the model, about")
    parser.add_argument("--layers", type=int, default=12, help="of the model")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--strategies", nargs="+", default=["zero2", "zero3"], help="of this package")
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="where checkpoints go; must be on a disk")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/checkpoint.json")
    options = parser.parse_args()
    # First, so that an error in it does not cost a measurement.
    environment = describe() | {"file_system": file_system(options.folder)}

    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=options.folder) as name:
        parent = Path(name)
        mp.start_processes(work, (free_port(), options, parent), nprocs=RANKS, start_method="spawn")
        seconds = json.loads((parent / "seconds.json").read_text())
    if "deepspeed" in seconds:
        environment["deepspeed"] = version("deepspeed")
    found = summary(seconds)
    result = {
        "environment": environment,
        "parameters": sum(p.numel() for p in Model(Size(options.parameters, options.layers)).parameters()),
        "ranks": RANKS,
        "summary": found,
        "criterion": criterion(found),
        "seconds": seconds,
    }
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(table(found))
    for what, met in result["criterion"].items():
        print(f"{what}: {'at most' if met else 'more than'} {GOAL} x the best peer")


if __name__ == "__main__":
    main()
