"""State on a disk: what the engine gets of the disk beside fio, and of a step's time.

    python -m benchmarks.nvme --path /local_nvme

Two questions, each in rounds that are interleaved:

- throughput: tiles read, written, and both at the same time, as the engine moves them
  (`lightning_zero.storage.disk_speed`), and the same part of the same file by fio, with as many threads, blocks of the
  same size and `O_DIRECT`, where that is installed;
- step: the update of AdamW in fp32 on one CPU rank, its state in host memory (`zero2_offload`) and on the disk
  (`zero2_nvme`), beside the time that the disk takes for the bytes of that state at the rate that is measured in the
  same round. The update includes the last writes.

The goal: fio's throughput within 5%, and an update that takes at most 1.1 times the larger one of the disk's time and
the update in host memory. DeepSpeed's NVMe offload is not compared here.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import statistics
import subprocess
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.environment import describe
from benchmarks.examples import ROOT
from lightning_zero import ZeroStrategy
from lightning_zero.storage import Lane
from lightning_zero.storage.disk_file import DiskFile
from lightning_zero.storage.disk_speed import DiskSpeed, Way, choose_way, measure
from lightning_zero.storage.nvme import transfer_bytes
from lightning_zero.storage.run_folder import RunFolder, file_system

WIDTH = 2048
PATTERNS = {"read": "read", "write": "write", "mixed": "rw"}  # ours, and what fio calls them


def fio(file: Path, nbytes: int, way: Way, pattern: str, seconds: float, direct: bool) -> float:
    """Bytes per second of a part of a file that is there; what is read and what is written both count."""
    share = nbytes // way.threads // way.block * way.block
    command = [
        *("fio", "--name=tiles", f"--filename={file}", f"--rw={PATTERNS[pattern]}", "--rwmixread=50"),
        *(f"--bs={way.block}", f"--numjobs={way.threads}", f"--size={share}", f"--offset_increment={share}"),
        *("--ioengine=psync", f"--direct={int(direct)}", "--thread", "--group_reporting", "--output-format=json"),
        *("--time_based", f"--runtime={seconds}s", "--allow_file_create=0"),
    ]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (job,) = json.loads(output)["jobs"]
    return float(job["read"]["bw_bytes"] + job["write"]["bw_bytes"])


def throughput(options: argparse.Namespace) -> dict[str, Any]:
    """Rates of both, by round."""
    folder, tile = RunFolder(options.path, f"benchmark-{secrets.token_hex(4)}", 0), transfer_bytes(1 << 28)
    limit = int(options.size_gb * 2**30)
    rounds: dict[str, dict[str, list[float]]] = {"engine": defaultdict(list), "fio": defaultdict(list)}
    try:
        file = DiskFile(folder.path / "measured.bin", Way().pool())
        way = choose_way(file, tile, limit)
        for _ in range(options.rounds):
            for name, rate in measure(file, tile, options.seconds, limit)._asdict().items():
                rounds["engine"][name].append(rate)
            for pattern in PATTERNS if shutil.which("fio") else ():
                rate = fio(file.path, file.nbytes, way, pattern, options.seconds, file.direct)
                rounds["fio"][pattern].append(rate)
        direct = file.direct
    finally:
        folder.remove()
    middle = {who: {name: statistics.median(rates) for name, rates in found.items()} for who, found in rounds.items()}
    return {
        "file_system": file_system(options.path).kind,
        "direct": direct,
        "way": way._asdict(),
        "tile_bytes": tile,
        "rounds": rounds,
        "median": middle,
        "engine_to_fio": {name: middle["engine"][name] / rate for name, rate in middle["fio"].items()} or None,
    }


def measured(options: argparse.Namespace) -> DiskSpeed:
    """What the disk does now, in the way that a run would choose."""
    folder, tile = RunFolder(options.path, f"benchmark-{secrets.token_hex(4)}", 0), transfer_bytes(1 << 28)
    limit = int(options.size_gb * 2**30)
    try:
        file = DiskFile(folder.path / "measured.bin", Way().pool())
        choose_way(file, tile, limit)
        return measure(file, tile, options.seconds / 2, limit)
    finally:
        folder.remove()


class Model(LightningModule):
    """Many weights, little to compute."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        out: Tensor = self.blocks(batch).square().mean()
        return out

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.ones(64, WIDTH), batch_size=1)  # type: ignore[arg-type]


class Updates(Callback):
    """Times what follows the gradients of a step, until the parameters are current and all is written."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.resting = 0

    def on_before_optimizer_step(self, trainer: Trainer, *_: Any) -> None:
        self._start = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, ZeroStrategy)
        assert strategy.memory is not None
        strategy.engine.settle()
        # Behind all writes in their lane.
        strategy.engine.placement.executor.submit(lambda: None, Lane.WRITE, "the end of an update").synchronize()
        self.seconds.append(time.perf_counter() - self._start)
        self.resting = strategy.memory.plan.held.disk


def update_time(options: argparse.Namespace, **strategy: Any) -> Updates:
    """Times a few updates in a training of its own; the first one makes the state."""
    updates = Updates()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=ZeroStrategy(stage=2, **strategy),
        max_steps=options.steps + 1,
        callbacks=[updates],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(max(1, round(options.params / WIDTH**2))))
    assert isinstance(trainer.strategy, ZeroStrategy)
    trainer.strategy.release()
    return updates


def steps(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the update in both places, by round, and of the disk alone, measured in the same round."""
    places = {
        "host": {"offload_optimizer": "cpu"},
        "disk": {"offload_optimizer": "nvme", "nvme_path": str(options.path)},
    }
    rounds: dict[str, list[float]] = {place: [] for place in (*places, "disk_alone", "disk_to_the_larger")}
    resting = 0
    for _ in range(options.rounds):
        for place, strategy in places.items():
            updates = update_time(options, **strategy)
            rounds[place].append(statistics.median(updates.seconds[1:]))
            resting = max(resting, updates.resting)
        rounds["disk_alone"].append(measured(options).seconds(resting, resting))
        bound = max(rounds["disk_alone"][-1], rounds["host"][-1])
        rounds["disk_to_the_larger"].append(rounds["disk"][-1] / bound)
    return {
        "params": max(1, round(options.params / WIDTH**2)) * WIDTH**2,
        "resting_bytes": resting,
        "rounds": rounds,
        "median": {what: statistics.median(found) for what, found in rounds.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, required=True, help="a folder on the disk")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement of throughput")
    parser.add_argument("--size-gb", type=float, default=1.0, help="GiB of the file, at most 1")
    parser.add_argument("--params", type=float, default=100e6, help="of the model")
    parser.add_argument("--steps", type=int, default=3, help="updates in each training")
    parser.add_argument("--disk", default="", help="what kind of disk it is, for the results")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/nvme.json")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    result: dict[str, Any] = {"environment": describe() | {"disk": options.disk, "load": load}}
    result["throughput"] = throughput(options)
    print(json.dumps(result["throughput"], indent=2), flush=True)
    result["update"] = steps(options)
    print(json.dumps(result["update"], indent=2), flush=True)
    result["environment"]["load_at_the_end"] = os.getloadavg()[0]
    version = (
        subprocess.run(["fio", "--version"], check=True, capture_output=True, text=True).stdout
        if shutil.which("fio")
        else ""
    )
    result["environment"]["fio"] = version.strip() or None
    options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
