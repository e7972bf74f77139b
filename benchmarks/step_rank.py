"""Runs one rank of one contestant of `benchmarks.step` in its own process.

    python -P benchmarks/step_rank.py '{"system": "zero2", ...}'

From this checkout it imports only `benchmarks/timing.py`, so that it also runs in the interpreter of another checkout:
`lightning_zero` is the package installed there. Peers need neither `lightning_zero` nor `lightning`.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the last one, so that no source hides an installed package

from benchmarks.timing import Clock, Engine, accumulate, counting, fit, forget_gradient, plain

VOCABULARY, HEAD = 1024, 64
SHORT = 8
MODELS = {"tiny": (2, 64), "26m": (8, 512), "200m": (16, 1024)}  # layers and width


class Job(NamedTuple):
    """The arguments of a rank.

    Attributes:
        system: name of the contestant.
        model: key of `MODELS`.
        precision: `"bf16"` or `"fp32"`.
        bf16_products: `"fp32"` to compute products of bf16 matrices in fp32 (`multiply_in_fp32`), otherwise `"bf16"`.
        micro_batches: number of micro-batches per optimizer step.
        batch: number of sequences per micro-batch.
        tokens: number of tokens per sequence.
        warmup: number of optimizer steps before the measured ones. The last of them are like the measured ones, as
            many as have two micro-batches; the others have sequences of `SHORT` tokens, since they only trigger work
            that a system does in its first steps.
        steps: number of measured optimizer steps.
        folder: folder for the results.
    """

    system: str
    model: str
    precision: str
    bf16_products: str
    micro_batches: int
    batch: int
    tokens: int
    warmup: int
    steps: int
    folder: str


class Model(nn.Module):
    """A GPT-like language model with pre-norm blocks and learned positions; maps token numbers to the loss."""

    def __init__(self, layers: int, width: int, tokens: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(tokens, width)
        options: dict[str, Any] = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        blocks = (nn.TransformerEncoderLayer(width, width // HEAD, 4 * width, **options) for _ in range(layers))
        self.layers = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, batch: Tensor) -> Tensor:
        tokens = batch.shape[1] - 1
        x = self.embedding(batch[:, :-1]) + self.position(torch.arange(tokens))
        mask = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def build(job: Job) -> Model:
    """The same model on every rank, with fp32 parameters."""
    torch.manual_seed(0)
    return Model(*MODELS[job.model], job.tokens)


def multiply_in_fp32() -> torch.library.Library:
    """Replace torch's products of two matrices on CPUs, in this process, by ones that compute in fp32.

    Results have the dtype of the operands. Where a processor has no instructions for bf16, torch's own products of bf16
    are up to a hundred times as slow as those of fp32, in the backward of `nn.Linear` above all, and would hide what
    a contestant does. Products inside of attention stay torch's.

    Returns:
        the registration, which ends with this object.
    """

    def mm(a: Tensor, b: Tensor) -> Tensor:
        product = a.new_empty(a.shape[0], b.shape[1], dtype=torch.float32)
        return torch.mm(a.float(), b.float(), out=product).to(a.dtype)  # `out` is an operator that is not replaced

    def addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        result = a.new_empty(a.shape[0], b.shape[1], dtype=torch.float32)
        return torch.addmm(bias.float(), a.float(), b.float(), beta=beta, alpha=alpha, out=result).to(a.dtype)

    library = torch.library.Library("aten", "IMPL")
    library.impl("mm", mm, "CPU")
    library.impl("addmm", addmm, "CPU")
    return library


def optimizer_of(parameters: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=1e-3)


def batches(job: Job) -> list[Tensor]:
    """All micro-batches of this rank."""
    draw = random.Random(dist.get_rank())
    short = max(0, job.warmup - (2 if job.micro_batches == 1 else 1))
    lengths = [min(SHORT, job.tokens)] * short + [job.tokens] * (job.warmup - short + job.steps)
    return [counting(draw, job.batch, tokens) for tokens in lengths for _ in range(job.micro_batches)]


def run_ddp(job: Job, clock: Clock) -> list[Tensor]:
    """DistributedDataParallel; with bf16 parameters AdamW updates fp32 masters or the parameters themselves."""
    model = build(job)
    masters = list(model.parameters())
    if job.precision == "bf16":
        masters = [nn.Parameter(p.detach().clone()) for p in masters]
        model.to(torch.bfloat16)
    if keeps_masters := job.precision == "bf16" and job.system == "ddp":
        optimizer = optimizer_of(masters)
    else:
        masters.clear()
        optimizer = optimizer_of(model.parameters())
    ddp = DistributedDataParallel(model)

    def micro(batch: Tensor, last: bool) -> Tensor:
        with contextlib.nullcontext() if last else ddp.no_sync():
            loss: Tensor = ddp(batch) / job.micro_batches
            loss.backward()
        return loss * job.micro_batches

    @torch.no_grad()
    def step() -> None:
        for parameter, master in zip(model.parameters(), masters, strict=False):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        optimizer.step()
        for parameter, master in zip(model.parameters(), masters, strict=False):
            parameter.copy_(master)
        optimizer.zero_grad()
        if keeps_masters:
            model.zero_grad()

    return accumulate(batches(job), job.micro_batches, clock, micro, step)


def run_forward_backward(job: Job, clock: Clock) -> list[Tensor]:
    """Forward and backward alone: no reduction, no update, and each gradient is freed as soon as it is complete."""
    model = build(job)
    if job.precision == "bf16":
        model.to(torch.bfloat16)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(forget_gradient)

    def micro(batch: Tensor, last: bool) -> Tensor:
        loss: Tensor = model(batch)
        loss.backward()
        return loss

    return accumulate(batches(job), job.micro_batches, clock, micro, lambda: None)


def run_fsdp2(job: Job, clock: Clock) -> list[Tensor]:
    """`fully_shard` of every block and of the rest; for bf16 it computes and reduces in bf16, with fp32 shards."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = build(job)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if job.precision == "bf16" else None)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    sharded = fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = optimizer_of(model.parameters())

    return plain(model, optimizer, batches(job), job.micro_batches, clock, sharded.set_requires_gradient_sync)


def run_deepspeed(job: Job, clock: Clock) -> list[Tensor]:
    """DeepSpeed's engine without clipping; the system's name has the stage, and `_offload` for its CPU AdamW."""
    import deepspeed

    deepspeed.init_distributed("gloo", dist_init_required=False)
    model = build(job)
    zero: dict[str, Any] = {"stage": int(job.system.removeprefix("deepspeed")[0])}
    optimizer: torch.optim.Optimizer
    if job.system.endswith("_offload"):
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        zero["offload_optimizer"] = {"device": "cpu"}
        optimizer = DeepSpeedCPUAdam(model.parameters(), lr=1e-3, weight_decay=0.01, adamw_mode=True)
    else:
        optimizer = optimizer_of(model.parameters())
    engine = Engine(job.batch, job.micro_batches, zero, bf16=job.precision == "bf16")
    return engine.run(model, optimizer, batches(job), clock)


def run_ours(job: Job, clock: Clock) -> list[Tensor]:
    """Lightning's Trainer with the strategy of this package that has the system's name."""
    import lightning_zero  # noqa: F401  # makes the names known

    return fit(
        build(job),
        optimizer_of,
        batches(job),
        job.micro_batches,
        clock,
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=job.system,
        precision="bf16-true" if job.precision == "bf16" else "32-true",
    )


RUNS = {
    "forward_backward": run_forward_backward,
    "ddp": run_ddp,
    "fsdp2": run_fsdp2,
    "deepspeed": run_deepspeed,
    "zero": run_ours,
}


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    warnings.filterwarnings("ignore")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    clock = Clock(job.warmup, job.steps, dist.barrier)  # the slower rank's time counts
    replaced = [multiply_in_fp32()] if (job.precision, job.bf16_products) == ("bf16", "fp32") else []
    run = next(run for start, run in RUNS.items() if job.system.startswith(start))
    loss = run(job, clock)[-1].double() / dist.get_world_size()
    dist.all_reduce(loss)
    result = clock.result() | {"loss": loss.item()}
    Path(job.folder, f"rank{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.barrier()  # peers may still read from this rank
    dist.destroy_process_group()
    replaced.clear()


if __name__ == "__main__":
    main()
