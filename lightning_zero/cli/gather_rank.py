"""A rank of the all-gather that `lightning-zero doctor --measure` times; two of them are started by torchrun."""

from __future__ import annotations

import json
import sys
import time

import torch
from lightning.fabric import Fabric

from lightning_zero.sharding import Mesh

_FEWEST = 3


def main(kind: str, seconds: float, nbytes: int) -> None:
    """Gathers again and again; rank 0 prints the bytes that it has sent in a second as JSON.

    Args:
        kind: of the devices.
        seconds: for which.
        nbytes: that are gathered each time.
    """
    fabric = Fabric(accelerator=kind, devices=2, strategy="ddp")
    fabric.launch()
    group = Mesh.create().world
    flat = torch.zeros(nbytes // 16 * 16, dtype=torch.uint8, device=fabric.device)

    def gather() -> float:
        start = time.perf_counter()
        group.all_gather_(flat, "measure an all-gather")
        float(flat[0])  # an accelerator has ended it
        return time.perf_counter() - start

    gather()
    count = group.broadcast_object(max(_FEWEST, int(seconds / gather())), "agree on repetitions")
    least = min(gather() for _ in range(count))
    if group.rank == 0:
        print(json.dumps({"bytes_per_second": flat.nbytes * (group.size - 1) / group.size / least}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
