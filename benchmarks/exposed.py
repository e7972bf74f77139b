"""How much of an offloaded update a GPU of a given speed would wait for: in the virtual time of the simulated device.

    python -m benchmarks.exposed --resume
    python -m benchmarks.exposed --gpus h100 --variants "fraction 0.75" --resume
    python -m benchmarks.exposed --scales 64 --variants "in backward" --out benchmarks/results/exposed_in_backward.json
    python -m benchmarks.exposed --gpus a100-40 --dram 100 --scales 128 --picture step.png --out exposed.json

A model of 10B parameters (48 layers 4096 wide, vocabulary 50304) trains with 16 sequences of 1024 tokens a step, in one
micro-batch, bf16, layers computed again in backward, gradients clipped by their global norm, AdamW with fp32 masters in
host memory. The training is the package's own, `lightning.Trainer` with `ZeroStrategy`; the device is that of
`tests/device`, which computes on this machine's cores and keeps a clock of its own: each piece of work takes what a
cost model says, and streams, events, copies, threads of the host and those who wait for them are ordered by it. Nothing
of this is the time of a real GPU: it is what the order of the work makes of the rates.

Such a model does not fit here. So all of its sizes (width, tokens of a sequence, vocabulary) are divided by `--scales`,
bytes per second by the square of that and operations per second by its cube; limits in bytes of the package (buckets,
staging, gradients in flight) are divided likewise. Bytes of weights, gradients, states and activations have shrunk by
the square, products by the cube: each piece of work takes as long as that of the large model. Two scales agree, which
the table shows.

The cost model, by machine: products at `MATMUL` of the vendor's rate, everything else the bytes it reads and writes, at
`HBM` of the vendor's bandwidth, and 5 us for any work; PCIe by its generation, in each direction, side by side; the
host's memory at 50, 100 or 200 GB/s, by all bytes that update kernels read and write and those that copies over PCIe do
(of which a kernel's elements pay their share when they are updated). Python takes no time, nor does attention but for
its bytes.

A machine runs the first of `zero2_offload` and `zero3_offload` whose plan (`lightning-zero estimate`) fits its memory.

What is told of a cell, in seconds of a step in the steady state: the step; forward and backward alone, on the device
(`compute`); the update on the host; each direction of PCIe; the bound, the largest of these; the ratio to it; what the
computing stream has stood still for, by lane. An update that is exact cannot begin before the last gradient is there,
since norm and overflow are not known: it has only the forward to hide under. `exact` is the bound that this leaves:
compute + max(0, update - forward), or PCIe where that is larger. The variant "in backward" (`update_in_backward=True`,
without clipping) leaves the bound itself.
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
NETWORK = 12.5e9  # one device sends nothing; stated since the cost model has it
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
    """The name that a machine runs, and what its plan says.

    Raises:
        RuntimeError: none of them fits.
    """
    sizes = f"--params 9.9e9 --layers {LAYERS} --hidden {WIDTH} --batch {SEQUENCES} --seq {TOKENS}"
    options = f"--precision bf16-true --checkpointing --gpu {gpu} --host 1000GB --json"
    command = [sys.executable, "-P", "-m", "lightning_zero.cli", "estimate", *sizes.split(), *options.split()]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    choices: dict[str, Any] = {}
    for choice in json.loads(said)["choices"]:  # of a name the first one has states in fp32
        choices.setdefault(choice["hydra"].split()[0].removeprefix("strategy="), choice)
    for name in NAMES:
        if choices[name]["device_fits"]:
            return {"strategy": name, **{key: choices[name][key] for key in ("device_peak_bytes", "host_peak_bytes")}}
    raise RuntimeError(f"none of {', '.join(NAMES)} fits {gpu}: {choices}")


def job_of(gpu: str, dram: float, scale: int, strategy: str, options: dict[str, Any]) -> dict[str, Any]:
    """What the process of a cell is told: rates are those of the large model's machine."""
    found = GPUS[gpu]
    rates = {"flops": MATMUL * found.matmul_16, "hbm": HBM * found.bandwidth, "pcie": PCIE[gpu], "network": NETWORK}
    return {**rates, "dram": dram, "scale": scale, "strategy": strategy, "options": options}


def measure(job: dict[str, Any]) -> Result:
    """Run a cell in a process of its own.

    Raises:
        RuntimeError: it failed.
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
    """One step of a cell, from its slices: lanes below each other, and what the computing stream waits for."""
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
