"""Shows where the time of an offloaded step goes on a GPU: lanes, kernels, copies, and gaps between kernels.

    python -m benchmarks.offload_profile --model 1.3b --name zero2_offload_sums
    python -m benchmarks.offload_profile --model tiny --tokens 128 --device cpu

It trains a model of `benchmarks.offload` as one of its contestants of this package, in this process. After three steps
without any observation, whose time is printed, two are traced by `callbacks.Trace` and then two by torch's profiler,
which slows the host down. The traces, for https://ui.perfetto.dev, and the figures are in `--folder`.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import lightning_zero
from benchmarks.environment import describe
from benchmarks.offload import MODELS, OURS, threads
from benchmarks.offload_rank import GIB, PLACES, REGISTERED, Host, Job, batches, build
from benchmarks.timing import Clock, fit
from lightning_zero.callbacks import Trace
from lightning_zero.storage.accelerators import device_type

WARMUP, TIMED, TRACED = 2, 3, 2  # numbers of optimizer steps
GAP = 500.0  # microseconds without a kernel that count as a gap


class Profiled(pl.Callback):
    """Runs torch's profiler over the last steps.

    Args:
        place: the device.
        micro_batches: number of micro-batches per step.
        first_step: number of steps before.
    """

    def __init__(self, place: Host, micro_batches: int, first_step: int) -> None:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if place.device.type == "cuda" else [])]
        self.profile = profile(activities=activities)
        self._place, self._ends = place, {first_step * micro_batches, (first_step + TRACED) * micro_batches}
        self._running = False

    def on_train_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
        if rest[-1] + 1 in self._ends:
            self._place.synchronize()
            (self.profile.stop if self._running else self.profile.start)()
            self._running = not self._running


def union(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of spans."""
    total, end = 0.0, -1.0
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def on_the_device(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Per step, the seconds of kernels and of each kind of copy, and the gaps between kernels."""
    spans: dict[str, list[tuple[float, float]]] = {}
    for event in events:
        kind = {"kernel": "kernels", "gpu_memcpy": event.get("name", "")}.get(event.get("cat", ""))
        if kind is not None:
            spans.setdefault(kind, []).append((event["ts"], event["ts"] + event["dur"]))
    kernels = sorted(spans.get("kernels", []))
    ends = itertools.accumulate((stop for _, stop in kernels), max)
    gaps = [start - end for end, (start, _) in zip(ends, kernels[1:], strict=False) if start - end > GAP]
    seconds = {kind: union(found) / 1e6 / TRACED for kind, found in spans.items()}
    return {"seconds": seconds, "gaps": len(gaps) / TRACED, "seconds_of_gaps": sum(gaps) / 1e6 / TRACED}


def observe(name: str, job: Job, place: Host, folder: Path) -> dict[str, Any]:
    """Train, write both traces and return the figures."""
    place.cap(round(job.device_memory_gib * GIB))
    before, observed = WARMUP + TIMED, 2 * TRACED + 1
    clock = Clock(WARMUP, TIMED + observed, place.synchronize)
    trace = Trace(folder, first_step=before, steps=TRACED)
    profiled = Profiled(place, job.micro_batches, before + TRACED + 1)  # a trace ends in the step after its last one
    flags = {"accelerator": place.accelerator, "devices": 1, "precision": "bf16-true"}
    REGISTERED.watch(device_type(place.device))
    strategy = lightning_zero.ZeroStrategy(**job.options)
    fit(
        build(job),
        lambda parameters: torch.optim.AdamW(parameters, lr=job.learning_rate),
        batches(job._replace(steps=TIMED + observed)),
        job.micro_batches,
        clock,
        callbacks=[trace, profiled],
        strategy=strategy,
        **flags,
    )
    profiled.profile.export_chrome_trace(str(plain := folder / f"{name}.json"))
    with plain.open("rb") as source, gzip.open(f"{plain}.gz", "wb") as target:
        shutil.copyfileobj(source, target)
    events = json.loads(plain.read_text())["traceEvents"]
    plain.unlink()
    lanes = json.loads((folder / "rank0.json").read_text())["otherData"]
    return {
        "seconds": sum(clock.result()["of_each_step"][:TIMED]) / TIMED,
        "busy_seconds": {lane: seconds / TRACED for lane, seconds in lanes["busy_seconds"].items()},
        "exposed_seconds": {lane: seconds / TRACED for lane, seconds in lanes["exposed_seconds"].items()},
        "device": on_the_device(events),
        **place.peaks(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="1.3b", choices=[*MODELS])
    parser.add_argument("--name", default="zero2_offload", choices=[*OURS])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--device-memory-gib", type=float, default=24.0, help="limit of torch's memory on the device")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a micro-batch")
    parser.add_argument("--tokens", type=int, default=1024, help="of a sequence")
    parser.add_argument("--micro-batches", type=int, default=4, help="that a step has")
    parser.add_argument("--folder", type=Path, default=Path("offload_profile"), help="for the traces and the figures")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(threads(options.device))
    os.environ.update({"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "NODE_RANK": "0"})
    place = PLACES[options.device]()
    chosen = {key: getattr(options, key) for key in ("device", "device_memory_gib", "batch", "tokens", "micro_batches")}
    with tempfile.TemporaryDirectory(prefix="offload-") as folder:
        dist.init_process_group(place.backend, init_method=f"file://{folder}/meet", rank=0, world_size=1)
        job = Job("ours", OURS[options.name], **chosen, **MODELS[options.model], warmup=WARMUP, steps=TIMED,
                  learning_rate=1e-4, folder=folder)  # fmt: skip
        start = time.monotonic()
        found = observe(options.name, job, place, options.folder)
        dist.destroy_process_group()
    result = {"environment": describe(), "seconds_in_all": time.monotonic() - start, **found}
    (options.folder / "figures.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
