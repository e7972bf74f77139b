"""Computes how long a GPU of a given speed would wait for offloaded updates, in virtual time of the simulated device.

    python -m benchmarks.exposed --resume
    python -m benchmarks.exposed --gpus h100 --variants "fraction 0.75" --resume
    python -m benchmarks.exposed --scales 64 --variants "in backward" --out benchmarks/results/exposed_in_backward.json
    python -m benchmarks.exposed --gpus a100-40 --dram 100 --scales 128 --picture step.png --out exposed.json

A model of 10B parameters (48 layers of width 4096, vocabulary 50304) trains with 16 sequences of 1024 tokens per step,
in one micro-batch, in bf16, with layers recomputed in backward, gradients clipped by their global norm, and AdamW with
fp32 masters in host memory. The training uses `lightning.Trainer` with `ZeroStrategy`. The device is that of
`tests/device`, which computes on this machine's cores and has a virtual clock: each operation takes the time that a
cost model gives, and streams, events, copies, host threads and waits are ordered by this clock. The results are not
times of a real GPU; they follow from the order of the work and the assumed rates.

Such a model is too large for a CPU. So all of its sizes (width, tokens per sequence, vocabulary) are divided by
`--scales`, bytes per second by the square of the scale and operations per second by its cube; the package's limits in
bytes (buckets, staging, gradients in flight) are divided by the square, too. Since the bytes of weights, gradients,
states and activations shrink by the square and matrix products by the cube, each operation takes as long as in the
large model. The table shows that two scales agree.

The cost model of a machine: matrix products run at `MATMUL` times the vendor's rate; everything else takes the time for
the bytes that it reads and writes, at `HBM` times the vendor's bandwidth; each operation takes 5 us in addition. PCIe
has the rate of its generation in each direction, independently. The host's memory has 50, 100 or 200 GB/s, for all
bytes that update kernels and copies over PCIe read and write (each kernel is charged for the copies of its elements).
Python takes no time, and attention only the time for its bytes.

A machine runs the first of `zero2_offload` and `zero3_offload` whose plan (`lightning-zero estimate`) fits its memory.

The results of a cell, in seconds per step in the steady state: the step; forward and backward alone, on the device
(`compute`); the update on the host; each direction of PCIe; the bound, which is the largest of these; the ratio of the
step to the bound; and the waits of the computing stream, by lane. An exact update cannot begin before the last gradient
has arrived, since norm and overflow are not known before. So it can only overlap with the next forward. `exact` is the
bound under this condition: compute + max(0, update - forward), or PCIe if that is larger. For the variant "in backward"
(`update_in_backward=True`, without clipping) the bound itself applies.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.contest import revision, save
from benchmarks.environment import describe
from benchmarks.examples import ROOT
from benchmarks.exposed_cell import LAYERS, SEQUENCES, TOKENS, WIDTH
from lightning_zero.planning.devices import GPUS

CELL = ROOT / "benchmarks/exposed_cell.py"
MATMUL, HBM = 0.6, 0.8
PCIE = {"a100-40": 25e9, "h100": 52e9, "4090": 25e9}
NETWORK = 12.5e9  # not used, since one device sends nothing; the cost model requires it
DRAM = (50, 100, 200)  # GB/s
NAMES = ("zero2_offload", "zero3_offload")
SCALES = (64, 128)
VARIANTS: dict[str, dict[str, Any]] = {
    "all": {},
    "split": {"master_layout": "split"},
    "fraction 0.75": {"offload_fraction": 0.75},
    "in backward": {"update_in_backward": True, "skip_nonfinite": False},
}

Result = dict[str, Any]


def plan_of(gpu: str) -> dict[str, Any]:
    """The strategy that a machine runs, and its plan.

    Raises:
        RuntimeError: no strategy fits.
    """
    sizes = f"--params 9.9e9 --layers {LAYERS} --hidden {WIDTH} --batch {SEQUENCES} --seq {TOKENS}"
    options = f"--precision bf16-true --checkpointing --gpu {gpu} --host 1000GB --json"
    command = [sys.executable, "-P", "-m", "lightning_zero.cli", "estimate", *sizes.split(), *options.split()]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    choices: dict[str, Any] = {}
    for choice in json.loads(said)["choices"]:  # the first choice of a name has fp32 state
        choices.setdefault(choice["hydra"].split()[0].removeprefix("strategy="), choice)
    for name in NAMES:
        if choices[name]["device_fits"]:
            return {"strategy": name, **{key: choices[name][key] for key in ("device_peak_bytes", "host_peak_bytes")}}
    raise RuntimeError(f"none of {', '.join(NAMES)} fits {gpu}: {choices}")


def job_of(gpu: str, dram: float, scale: int, strategy: str, options: dict[str, Any]) -> dict[str, Any]:
    """The arguments for the process of a cell; rates are those of the large model's machine."""
    found = GPUS[gpu]
    rates = {"flops": MATMUL * found.matmul_16, "hbm": HBM * found.bandwidth, "pcie": PCIE[gpu], "network": NETWORK}
    return {**rates, "dram": dram, "scale": scale, "strategy": strategy, "options": options}


def measure(job: dict[str, Any]) -> Result:
    """Run a cell in a separate process.

    Raises:
        RuntimeError: the process failed.
    """
    command = [sys.executable, "-P", str(CELL), json.dumps(job)]
    own = {"OMP_NUM_THREADS": "1", "TORCH_FR_BUFFER_SIZE": "0", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | own, check=False)
    if done.returncode:
        raise RuntimeError(f"the cell {job} ended with {done.returncode}:\n{done.stderr[-5000:]}")
    found: Result = json.loads(done.stdout.splitlines()[-1])
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", nargs="+", default=list(PCIE), choices=list(PCIE))
    parser.add_argument("--dram", nargs="+", type=int, default=DRAM, help="GB/s of the host's memory")
    parser.add_argument("--scales", nargs="+", type=int, default=SCALES, help="powers of two up to 128")
    parser.add_argument("--variants", nargs="+", default=["all"], choices=list(VARIANTS))
    parser.add_argument("--picture", type=Path, help="of the last cell: a PNG; needs matplotlib")
    parser.add_argument("--resume", action="store_true", help="keep the cells that --out has")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/exposed.json")
    return parser.parse_args()


def table(cells: dict[str, Result]) -> str:
    """The cells as a Markdown table, in seconds."""
    columns = "step forward compute host to_device to_host bound ratio exact ratio_to_exact".split()
    lines = [f"| cell | {' | '.join(columns)} | exposed |", "|---" * (2 + len(columns)) + "|"]
    for name, cell in cells.items():
        waits = ", ".join(f"{lane} {seconds:.2f}" for lane, seconds in cell["exposed"].items() if seconds > 0.005)
        lines.append(f"| {name} | {' | '.join(f'{cell[c]:.2f}' for c in columns)} | {waits} |")
    return "\n".join(lines)


def draw(cell: Result, title: str, path: Path) -> None:
    """Draw one step of a cell: the lanes one below the other, and the waits of the computing stream."""
    import matplotlib as mpl  # only for pictures

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    tracks = ["exposed", "H2D", "HOST", "D2H", "training"]
    colors = {"forward": "tab:blue", "backward": "tab:orange", "exposed": "tab:red"}
    figure, axes = plt.subplots(figsize=(9, 2.2), dpi=90)
    for track, _, name, start, stop in cell["slices"]:
        start, stop = max(start, 0.0), min(stop, cell["step"])
        if track in tracks and stop > start and (track != "training" or name in colors):
            color = colors.get(name, colors.get(track, "tab:gray"))
            axes.barh(tracks.index(track), stop - start, left=start, color=color, edgecolor="white", linewidth=0.2)
    labels = ["exposed", "to device", "update", "to host", "compute"]
    axes.set_yticks(range(len(tracks)), labels)
    axes.set_xlim(0, cell["step"])
    axes.set_xlabel("virtual seconds of a step (blue: forward, orange: backward)")
    axes.set_title(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    options = parse()
    environment = describe() | {"commit": revision(ROOT)}
    setting = {"matmul": MATMUL, "hbm": HBM, "pcie": PCIE, "network": NETWORK}
    result: Result = {"environment": environment, "setting": setting, "plans": {}, "cells": {}}
    if options.resume and options.out.exists():
        result = json.loads(options.out.read_text())
    for gpu in options.gpus:
        plan = result["plans"].setdefault(gpu, plan_of(gpu))
        for variant in options.variants:
            for scale in options.scales:
                for dram in options.dram:
                    name = " ".join(filter(None, [gpu, plan["strategy"], variant, f"{dram} GB/s", f"1/{scale}"]))
                    if name in result["cells"]:
                        continue
                    start = time.monotonic()
                    job = job_of(gpu, dram * 1e9, scale, plan["strategy"], VARIANTS[variant])
                    result["cells"][name] = measure(job)
                    save(result, options.out)
                    print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
    if options.picture:
        last = measure(job_of(gpu, dram * 1e9, scale, plan["strategy"], VARIANTS[variant]) | {"slices": True})
        draw(last, name, options.picture)
    print(table(result["cells"]))


if __name__ == "__main__":
    main()
