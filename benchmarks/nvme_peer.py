"""DeepSpeed's part of `benchmarks.nvme`: updates of state on a disk, run by the interpreter that has DeepSpeed.

    python -P benchmarks/nvme_peer.py '{"layers": 4, "width": 2048, "steps": 3, "path": "/local_nvme", ...}'

It uses ZeRO-Infinity's optimizer offload (stage 3, one CPU rank) with DeepSpeed's CPU AdamW in fp32, libaio with
`O_DIRECT`, and reads and writes pipelined with the update: each layer is one group of parameters, and there are buffers
for three groups, so that one is read, one updated and one written at the same time. It prints the seconds of each
update as JSON. Gradients are written to the disk in the backward pass, which is not measured.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_STATES = 4  # number of tensors that DeepSpeed moves: parameter, gradient, and Adam's two moments


class Job(NamedTuple):
    """The arguments of the process.

    Attributes:
        layers: number of layers, of `width` * `width` parameters each.
        width: width of the model.
        steps: number of measured updates, after one that makes the state.
        path: a folder on the disk.
        block: bytes per block of a transfer.
        depth: number of blocks at a time.
        port: a free port, for a group of one rank.
    """

    layers: int
    width: int
    steps: int
    path: str
    block: int
    depth: int
    port: int


class Model(nn.Module):
    """The model of `benchmarks.nvme`."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(width, width, bias=False)) for _ in range(layers)))

    def forward(self, batch: Tensor) -> Tensor:
        out: Tensor = self.blocks(batch).square().mean()
        return out


def config_of(job: Job) -> dict[str, Any]:
    """DeepSpeed's configuration."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "steps_per_print": 1 << 30,
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": job.width**2,
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": job.path,
                "buffer_count": 3 * _STATES,
                "pipeline_read": True,
                "pipeline_write": True,
            },
        },
        "aio": {
            "block_size": job.block,
            "queue_depth": job.depth,
            "intra_op_parallelism": 1,
            "single_submit": False,
            "overlap_events": True,
        },
    }


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    warnings.filterwarnings("ignore")
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job.port)}
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    # One rank sends nothing, so DeepSpeed's operator for communication need not be built.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.init_distributed("gloo")
    model = Model(job.layers, job.width)
    optimizer = DeepSpeedCPUAdam(model.parameters(), lr=1e-4, weight_decay=0.01, adamw_mode=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config_of(job))
    seconds = []
    for _ in range(job.steps + 1):
        engine.backward(engine(torch.ones(1, job.width)))
        start = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - start)
    print(json.dumps(seconds[1:]), flush=True)  # DeepSpeed's threads may end the process by an abort at its exit


if __name__ == "__main__":
    main()
