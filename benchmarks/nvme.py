"""Measures state on a disk: the engine's throughput compared with fio, and the time of an update.

    python -m benchmarks.nvme --path /local_nvme --deepspeed-python ../peers/bin/python

There are two measurements, each in interleaved rounds:

- throughput: tiles are read, written, and both at the same time, as the engine moves them by threads and by io_uring,
  each in its fastest way (`lightning_zero.storage.disk_speed`). If fio is installed, it transfers the same part of the
  same file, with as many threads, or as many rings of the same depth, and with blocks of the same size and `O_DIRECT`.
  Transfers from and to huge pages are faster. The engine has such buffers, and fio does not. So both are measured in
  small pages, too.
- step: the update of AdamW in fp32 on one CPU rank, with state in host memory (`zero2_offload`) and on the disk
  (`zero2_nvme`, by either backend), compared with the time that the disk needs for the bytes of that state at the rate
  measured in the same round. The update includes the last writes. If an interpreter has DeepSpeed and its libaio
  operator, its NVMe offload updates the same model in the same rounds (see `benchmarks/nvme_peer.py`); both bypass the
  page cache. DeepSpeed also reads the gradients from the disk in its update; here they stay in host memory, because the
  clock does not cover backward, in which they would be written. DeepSpeed's process may crash at its exit, after it has
  printed its times: these count, and the results include the exit codes.

The goals: fio's throughput within 5%; and an update that takes at most 1.1 times the larger of the disk's time and the
update in host memory, and at most 0.8 times DeepSpeed's update.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import itertools
import json
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import unittest.mock
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.environment import describe, free_port
from benchmarks.examples import ROOT
from lightning_zero import ZeroStrategy, ops
from lightning_zero.storage import DiskStore, Lane, disk_speed
from lightning_zero.storage.disk_file import DiskFile
from lightning_zero.storage.disk_speed import RINGS, THREADS, DiskSpeed, Way, choose_way, measure
from lightning_zero.storage.nvme import transfer_bytes
from lightning_zero.storage.run_folder import RunFolder, file_system
from lightning_zero.storage.threads import FILE_LANES

WIDTH = 2048
_REST_SECONDS = 1.0
_RINGS = FILE_LANES[Lane.READ]  # of the engine, for reads and for writes
PEER = Way(16, 1 << 20)  # DeepSpeed's depth and block, those that are often the fastest here
SMALL_PAGES = ", small pages"
PATTERNS = {"read": "read", "write": "write", "mixed": "rw"}  # the patterns, and fio's names of them


def backends() -> dict[ops.DiskBackend, Sequence[Way]]:
    """The available backends, each with the ways to use it."""
    return {"threads": THREADS} if ops.io_uring_refusal() else {"threads": THREADS, "io_uring": RINGS}


@contextlib.contextmanager
def small_pages() -> Iterator[None]:
    """A context in which memory of this process and of those that it starts is not in huge pages, if it is Linux's."""
    set_pages = partial(ctypes.CDLL(None).prctl, 41)  # PR_SET_THP_DISABLE
    set_pages(1, 0, 0, 0)
    try:
        yield
    finally:
        set_pages(0, 0, 0, 0)


def fio(file: Path, nbytes: int, way: Way, pattern: str, seconds: float, direct: bool) -> float:
    """Fio's bytes per second for a part of an existing file; reads and writes both count."""
    rings = _RINGS * (2 if pattern == "mixed" else 1)
    jobs = way.depth if way.backend == "threads" else rings
    share = nbytes // jobs // way.block * way.block
    engine = ["--ioengine=psync"] if way.backend == "threads" else ["--ioengine=io_uring", f"--iodepth={way.depth}"]
    command = [
        *("fio", "--name=tiles", f"--filename={file}", f"--rw={PATTERNS[pattern]}", "--rwmixread=50"),
        *(f"--bs={way.block}", f"--numjobs={jobs}", f"--size={share}", f"--offset_increment={share}"),
        *(*engine, f"--direct={int(direct)}", "--thread", "--group_reporting", "--output-format=json"),
        *("--time_based", f"--runtime={seconds}s", "--allow_file_create=0"),
    ]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (job,) = json.loads(output)["jobs"]
    return float(job["read"]["bw_bytes"] + job["write"]["bw_bytes"])


def throughput(options: argparse.Namespace) -> dict[str, Any]:
    """The rates of the engine and of fio, by backend and round."""
    folder, tile = RunFolder(options.path, f"benchmark-{secrets.token_hex(4)}", 0), transfer_bytes(1 << 28)
    limit = int(options.size_gb * 2**30)
    rounds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    try:
        file = DiskFile(folder.path / "measured.bin", Way().pool())
        ways = {backend: choose_way(file, tile, limit, among=among) for backend, among in backends().items()}
        for _ in range(options.rounds):
            for (backend, way), pages in itertools.product(ways.items(), ("", SMALL_PAGES)):
                file.pool, who = way.pool(), backend + pages
                with small_pages() if pages else contextlib.nullcontext():
                    start, busy = time.perf_counter(), time.process_time()
                    for name, rate in measure(file, tile, options.seconds, limit)._asdict().items():
                        rounds[who][name].append(rate)
                    cores = (time.process_time() - busy) / (time.perf_counter() - start)
                    rounds[who]["cores"].append(cores)  # number of busy cores, in user code and in the system
                    for pattern in PATTERNS if shutil.which("fio") else ():
                        rate = fio(file.path, file.nbytes, way, pattern, options.seconds, file.direct)
                        rounds[f"fio, {who}"][pattern].append(rate)
        direct = file.direct
    finally:
        folder.remove()
    ours = [who for who in rounds if not who.startswith("fio")]
    middle = {who: {name: statistics.median(rates) for name, rates in found.items()} for who, found in rounds.items()}
    return {
        "file_system": file_system(options.path).kind,
        "direct": direct,
        "io_uring_refusal": ops.io_uring_refusal() or None,
        "ways": {backend: way._asdict() for backend, way in ways.items()},
        "tile_bytes": tile,
        "rounds": rounds,
        "median": middle,
        "engine_to_fio": {who: ratios(rounds[who], rounds.get(f"fio, {who}")) for who in ours},
        "io_uring_to_threads": ratios(rounds.get("io_uring"), rounds["threads"]),
    }


def ratios(ones: dict[str, list[float]] | None, others: dict[str, list[float]] | None) -> dict[str, float] | None:
    """Medians of the ratios of ``ones`` to ``others`` in the same rounds; ``None`` if one of them is missing."""
    if not ones or not others:
        return None
    pairs = {name: zip(rates, others[name], strict=True) for name, rates in ones.items() if name in others}
    return {name: statistics.median(one / other for one, other in found) for name, found in pairs.items()}


def let_disk_rest() -> None:
    """Gives the disk time to free the blocks of removed files, so that this is not measured, too."""
    os.sync()
    time.sleep(_REST_SECONDS)


def measured(options: argparse.Namespace) -> DiskSpeed:
    """The current speed of the disk, in the way that a run would choose."""
    let_disk_rest()
    folder, tile = RunFolder(options.path, f"benchmark-{secrets.token_hex(4)}", 0), transfer_bytes(1 << 28)
    limit = int(options.size_gb * 2**30)
    try:
        file = DiskFile(folder.path / "measured.bin", Way().pool())
        choose_way(file, tile, limit)
        return measure(file, tile, options.seconds / 2, limit)
    finally:
        folder.remove()


class Model(LightningModule):
    """A model with many weights and little to compute."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        layer = partial(nn.Linear, WIDTH, WIDTH, bias=False)
        self.blocks = nn.Sequential(*(nn.Sequential(layer()) for _ in range(layers)))  # each is a unit

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        out: Tensor = self.blocks(batch).square().mean()
        return out

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.ones(64, WIDTH), batch_size=1)  # type: ignore[arg-type]


class Updates(Callback):
    """Measures the time from a step's gradients until the parameters are updated and everything is written."""

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
        store = strategy.engine.placement.optimizer_store
        if isinstance(store, DiskStore):
            store.settle()
        self.seconds.append(time.perf_counter() - self._start)
        self.resting = strategy.memory.plan.held.disk


def update_time(options: argparse.Namespace, **strategy: Any) -> Updates:
    """Measures a few updates in a separate training; the first one makes the state."""
    let_disk_rest()
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
    trainer.fit(Model(layers_of(options)))
    assert isinstance(trainer.strategy, ZeroStrategy)
    trainer.strategy.release()
    del trainer
    gc.collect()  # a Trainer refers to itself
    return updates


def layers_of(options: argparse.Namespace) -> int:
    """The number of layers of a model with about the requested number of parameters."""
    return max(1, round(options.params / WIDTH**2))


class PeerTimes(NamedTuple):
    """The results of DeepSpeed's process.

    Attributes:
        seconds: seconds of each update.
        exit_code: exit code of the process; not 0 if it crashed after it had printed the times, as some versions do
            when they stop their I/O threads (-6: by an abort).
    """

    seconds: list[float]
    exit_code: int


def update_time_of_deepspeed(options: argparse.Namespace) -> PeerTimes:
    """Measures a few updates by DeepSpeed, in a temporary folder.

    Raises:
        SystemExit: DeepSpeed's process printed no times.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=options.path) as folder:
        job = {
            "layers": layers_of(options),
            "width": WIDTH,
            "steps": options.steps,
            "path": folder,
            "block": PEER.block,
            "depth": PEER.depth,
            "port": free_port(),
        }
        script = str(ROOT / "benchmarks/nvme_peer.py")
        command = [options.deepspeed_python, "-P", script, json.dumps(job)]
        tools = f"{Path(options.deepspeed_python).parent}{os.pathsep}{os.environ['PATH']}"  # ninja, to build operators
        environment = os.environ | {"PATH": tools, "OMP_NUM_THREADS": str(torch.get_num_threads())}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if (seconds := times_in(done.stdout, options.steps)) is None:
        raise SystemExit(
            f"DeepSpeed's NVMe offload ended with {done.returncode} and printed no times of {options.steps} updates:\n"
            f"{done.stdout[-1000:]}\n{done.stderr[-4000:]}"
        )
    return PeerTimes(seconds, done.returncode)


def times_in(output: str, steps: int) -> list[float] | None:
    """The last line of the output that is a list of ``steps`` numbers; libraries print other lines."""
    for line in reversed(output.splitlines()):
        with contextlib.suppress(json.JSONDecodeError):
            found = json.loads(line)
            if isinstance(found, list) and len(found) == steps and all(isinstance(each, float) for each in found):
                return found
    return None


def deepspeed_version(options: argparse.Namespace) -> str | None:
    """DeepSpeed's version in the named interpreter; ``None`` if it is not installed."""
    code = "from importlib.metadata import version; print(version('deepspeed'))"
    command = [options.deepspeed_python, "-P", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None


def steps(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds, by round, of the update with state in host memory and on the disk, and of the disk alone."""
    disk = {"offload_optimizer": "nvme", "nvme_path": str(options.path), "offload_gradients": "cpu"}
    deepspeed = deepspeed_version(options)
    if deepspeed is None:
        print(f"DeepSpeed is left out: {options.deepspeed_python} does not have it")
    rounds: dict[str, list[float]] = defaultdict(list)
    resting, exit_codes = 0, list[int]()
    for _ in range(options.rounds):
        rounds["host"].append(statistics.median(update_time(options, offload_optimizer="cpu").seconds[1:]))
        for backend in backends():
            with moved_by(backend):
                updates = update_time(options, **disk)
                resting = max(resting, updates.resting)
                rounds[f"disk, {backend}"].append(statistics.median(updates.seconds[1:]))
                rounds[f"disk alone, {backend}"].append(measured(options).seconds(resting, resting))
        if deepspeed is not None:
            theirs = update_time_of_deepspeed(options)
            rounds["deepspeed"].append(statistics.median(theirs.seconds))
            exit_codes.append(theirs.exit_code)
        alone = min(rounds[f"disk alone, {backend}"][-1] for backend in backends())
        for backend in backends():
            bound = max(alone, rounds["host"][-1])
            rounds[f"{backend} to the larger"].append(rounds[f"disk, {backend}"][-1] / bound)
            if deepspeed is not None:
                ratio = rounds[f"disk, {backend}"][-1] / rounds["deepspeed"][-1]
                rounds[f"{backend} to deepspeed"].append(ratio)
    return {
        "params": layers_of(options) * WIDTH**2,
        "resting_bytes": resting,
        "rounds": rounds,
        "median": {what: statistics.median(found) for what, found in rounds.items()},
        "minimum": {what: min(found) for what, found in rounds.items()},
        "deepspeed": deepspeed,
        "deepspeed_exit_codes": exit_codes,
        "deepspeed_aio": PEER._asdict() | {"backend": "libaio"} if deepspeed is not None else None,
    }


@contextlib.contextmanager
def moved_by(backend: ops.DiskBackend) -> Iterator[None]:
    """A context in which only the ways of one backend are available."""
    with unittest.mock.patch.object(disk_speed, "ways", return_value=backends()[backend]):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, required=True, help="a folder on the disk")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement of throughput")
    parser.add_argument("--size-gb", type=float, default=1.0, help="GiB of the file, at most 1")
    parser.add_argument("--params", type=float, default=100e6, help="of the model")
    parser.add_argument("--steps", type=int, default=3, help="updates in each training")
    parser.add_argument("--deepspeed-python", default=sys.executable, help="an interpreter that has DeepSpeed")
    parser.add_argument("--only-update", action="store_true", help="measure no throughput")
    parser.add_argument("--disk", default="", help="what kind of disk it is, for the results")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/nvme.json")
    options = parser.parse_args()
    options.deepspeed_python = str(Path(options.deepspeed_python).absolute())
    load = os.getloadavg()[0]
    result: dict[str, Any] = {"environment": describe() | {"disk": options.disk, "load": load}}
    if not options.only_update:
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
