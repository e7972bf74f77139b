"""One rank of one contestant of `benchmarks.step`, a process of its own.

    python -P benchmarks/step_rank.py '{"system": "zero2", ...}'

It imports nothing of this checkout, so that the interpreter of another one can run it: `lightning_zero` is the one that
the interpreter has installed, and peers need neither that nor `lightning`.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

VOCABULARY, HEAD = 1024, 64
SHORT = 8
MODELS = {"tiny": (2, 64), "26m": (8, 512), "200m": (16, 1024)}  # layers and width


class Job(NamedTuple):
    """What a rank is to do.

    Attributes:
        system: name of the contestant.
        model: key of `MODELS`.
        precision: `"bf16"` or `"fp32"`.
        micro_batches: per optimizer step.
        batch: sequences of a micro-batch.
        tokens: of a sequence.
        warmup: optimizer steps before the measured ones, the last one or two of which are like those; the sequences of
            the others have `SHORT` tokens, since they are there for what a system does in its first steps only.
        steps: optimizer steps that are measured.
        folder: where the results go.
    """

    system: str
    model: str
    precision: str
    micro_batches: int
    batch: int
    tokens: int
    warmup: int
    steps: int
    folder: str


class Model(nn.Module):
    """A language model like GPT: pre-norm blocks, learned positions; from token numbers to the loss."""

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


def optimizer_of(parameters: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=1e-3)


def batches(job: Job) -> list[Tensor]:
    """All micro-batches of this rank: numbers that count up from drawn small ones, so that the loss falls at once."""
    draw = random.Random(dist.get_rank())

    def micro_batch(tokens: int) -> Tensor:
        starts = torch.tensor([[draw.randrange(SHORT)] for _ in range(job.batch)])
        return starts + torch.arange(tokens + 1)

    short = max(0, job.warmup - 2)
    lengths = [min(SHORT, job.tokens)] * short + [job.tokens] * (job.warmup - short + job.steps)
    return [micro_batch(tokens) for tokens in lengths for _ in range(job.micro_batches)]


class Clock:
    """Seconds and peak memory of the measured steps; told of the end of every optimizer step, the first ones too."""

    def __init__(self, job: Job) -> None:
        self._warmup, self._steps = job.warmup, job.steps
        self._ends: list[float] = []
        self._done = 0
        self.initial_peak = 0.0

    def tick(self) -> None:
        """An optimizer step has ended."""
        self._done += 1
        if self._done == self._warmup:
            self.initial_peak = peak()
            dist.barrier()
            forget_peak()
        elif self._done == self._warmup + self._steps:
            dist.barrier()  # the slower rank's time counts
        if self._done >= self._warmup:
            self._ends.append(time.perf_counter())

    def result(self) -> dict[str, Any]:
        seconds = [end - start for start, end in zip(self._ends, self._ends[1:], strict=False)]
        if len(seconds) != self._steps:
            raise RuntimeError(f"{len(seconds)} steps were measured; expected {self._steps}")
        last = peak()
        return {
            "seconds": sum(seconds) / len(seconds),
            "of_each_step": seconds,
            "peak_gib": max(self.initial_peak, last) / 2**30,
            "peak_of_steps_gib": last / 2**30,
        }


def peak() -> float:
    """Most bytes that were resident since the start, or since `forget_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def forget_peak() -> None:
    """Begin a new peak; without effect where the system has none to begin."""
    Path("/proc/self/clear_refs").write_text("5")


def accumulate(job: Job, clock: Clock, micro: Callable[[Tensor, bool], Tensor], step: Callable[[], None]) -> Tensor:
    """The plain loop of the peers.

    Args:
        micro: runs forward and backward of a micro-batch, of which it is told whether it is the last one of the step.
        step: updates and clears the gradients.

    Returns:
        The loss of the last micro-batch.
    """
    for number, batch in enumerate(batches(job), 1):
        last = number % job.micro_batches == 0
        loss = micro(batch, last)
        if last:
            step()
            clock.tick()
    return loss.detach()


def run_ddp(job: Job, clock: Clock) -> Tensor:
    """DistributedDataParallel; in bf16 with bf16 parameters, of which AdamW updates fp32 masters, or themselves."""
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

    return accumulate(job, clock, micro, step)


def run_fsdp2(job: Job, clock: Clock) -> Tensor:
    """`fully_shard` of every block and of the rest; in bf16 computing and reducing in it, with fp32 shards."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = build(job)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if job.precision == "bf16" else None)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    sharded = fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = optimizer_of(model.parameters())

    def micro(batch: Tensor, last: bool) -> Tensor:
        sharded.set_requires_gradient_sync(last)
        loss: Tensor = model(batch) / job.micro_batches
        loss.backward()
        return loss * job.micro_batches

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return accumulate(job, clock, micro, step)


def run_deepspeed(job: Job, clock: Clock) -> Tensor:
    """DeepSpeed's engine, without clipping: `deepspeed` and the stage, `_offload` with its own AdamW of the CPU."""
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
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config={
            "train_micro_batch_size_per_gpu": job.batch,
            "gradient_accumulation_steps": job.micro_batches,
            "gradient_clipping": 0.0,  # the default is 1
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": job.precision == "bf16"},
            "steps_per_print": 1 << 30,
        },
    )

    def micro(batch: Tensor, last: bool) -> Tensor:
        loss: Tensor = engine(batch)
        engine.backward(loss)
        engine.step()  # which counts micro-batches
        return loss

    return accumulate(job, clock, micro, lambda: None)


def run_ours(job: Job, clock: Clock) -> Tensor:
    """Lightning's Trainer with a strategy of this package, by its name."""
    import lightning.pytorch as pl
    from torch.utils.data import DataLoader

    import lightning_zero  # noqa: F401  # makes the names known

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = build(job)
            self.last = torch.tensor(0.0)

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            loss: Tensor = self.model(batch)
            self.last = loss.detach()
            return loss

        def configure_optimizers(self) -> torch.optim.AdamW:
            return optimizer_of(self.parameters())

    class Ticks(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
            if (rest[-1] + 1) % job.micro_batches == 0:
                clock.tick()

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=job.system,
        precision="bf16-true" if job.precision == "bf16" else "32-true",
        accumulate_grad_batches=job.micro_batches,
        max_epochs=1,
        callbacks=[Ticks()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    module = Module()
    trainer.fit(module, DataLoader(batches(job), batch_size=None))  # type: ignore[arg-type]  # a list is a data set
    return module.last


RUNS = {"ddp": run_ddp, "fsdp2": run_fsdp2, "deepspeed": run_deepspeed, "zero": run_ours}


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    warnings.filterwarnings("ignore")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    clock = Clock(job)
    run = next(run for start, run in RUNS.items() if job.system.startswith(start))
    loss = run(job, clock).double() / dist.get_world_size()
    dist.all_reduce(loss)
    result = clock.result() | {"loss": loss.item()}
    Path(job.folder, f"rank{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.barrier()  # peers may still read from this rank
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
