"""Compares the time of torch's Muon, one matrix at a time, with that of batches of equal matrices, on the host.

    OMP_NUM_THREADS=1 python -m benchmarks.muon_batches

Steps of both are interleaved, on matrices of equal shapes. The time is CPU time of the process, which other processes
disturb less than wall-clock time. Batches have no limit here; the limit of ``BatchedMuon.at_once`` was derived from the
results.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import describe
from benchmarks.examples import ROOT
from lightning_zero.update.newton_schulz import BatchedMuon

CASES = (
    *(((64, 64), count) for count in (2, 4, 8)),
    *(((256, 64), count) for count in (2, 4, 8)),
    *(((128, 128), count) for count in (2, 4, 8)),
    *(((256, 256), count) for count in (2, 8)),
    *((shape, 2) for shape in ((768, 768), (2304, 768))),  # of GPT-2
)


class Unlimited(BatchedMuon):
    def at_once(self, group: dict[str, Any], shape: torch.Size, device: torch.device) -> int:
        return 1 << 31


def measure(shape: tuple[int, int], count: int, rounds: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    times: dict[str, list[float]] = {"torch": [], "batched": []}
    optimizers = {}
    for name, kind in (("torch", torch.optim.Muon), ("batched", Unlimited)):
        matrices = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for _ in range(count)]
        for matrix in matrices:
            matrix.grad = torch.randn(shape, generator=generator)
        optimizers[name] = kind(matrices)
        optimizers[name].step()
    for _ in range(rounds):
        for name, optimizer in optimizers.items():
            began = time.process_time()
            optimizer.step()
            times[name].append(time.process_time() - began)
    found = {name: (statistics.median(each), min(each)) for name, each in times.items()}
    return {
        "shape": shape,
        "matrices": count,
        "rounds": rounds,
        **{f"{name}_ms": round(1e3 * median, 3) for name, (median, _) in found.items()},
        **{f"{name}_ms_min": round(1e3 * least, 3) for name, (_, least) in found.items()},
        "torch_by_batched": round(found["torch"][0] / found["batched"][0], 2),
        "torch_by_batched_min": round(found["torch"][1] / found["batched"][1], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=float, default=6e8, help="multiply-adds by which the rounds are chosen")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/muon_batches.json")
    options = parser.parse_args()
    rows = []
    for shape, count in CASES:
        rounds = min(41, max(3, int(options.work / (count * shape[0] * shape[1] * min(shape)))))
        rows.append(measure(shape, count, rounds))
        print(rows[-1], flush=True)
    options.out.write_text(json.dumps({"environment": describe(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
