"""Runs one contestant of `benchmarks.offload` in its own process, with one device.

    python -P benchmarks/offload_rank.py '{"system": "fsdp2", ...}'

From this checkout it imports only the two modules below, so that it also runs in a peer's interpreter, which needs
neither `lightning_zero` nor `lightning`.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the last one, so that no source hides an installed package

from benchmarks.timing import Clock, Engine, counting, fit, forget_gradient, plain
from benchmarks.transformer import Block

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30
PERIOD = 1_000_003  # a prime, so that no two neighbouring rows of a matrix begin with the same numbers
ALONE = 3  # number of steps of forward and backward alone; the first one is not measured
# Texts in errors about memory, from runtimes, allocators and this package's plans, besides torch's error type.
OUT_OF_MEMORY = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "allocate memory", "CUDA out of memory")
OUT_OF_MEMORY_TYPES = ("OutOfMemoryError", "MemoryError", "DoesNotFitError")


class Job(NamedTuple):
    """The arguments of the process.

    Attributes:
        system: key of `RUNS`.
        options: options of the system: arguments of `ZeroStrategy`, or parts of DeepSpeed's configuration.
        device: key of `PLACES`.
        device_memory_gib: limit of the memory of torch's tensors on the device.
        layers: number of layers.
        width: width of the model.
        heads: number of attention heads.
        vocabulary: size of the vocabulary.
        batch: number of sequences per micro-batch.
        tokens: number of tokens per sequence.
        micro_batches: number of micro-batches per optimizer step.
        warmup: number of optimizer steps before the measured ones.
        steps: number of measured optimizer steps.
        learning_rate: learning rate of AdamW.
        folder: folder for the results.
    """

    system: str
    options: dict[str, Any]
    device: str
    device_memory_gib: float
    layers: int
    width: int
    heads: int
    vocabulary: int
    batch: int
    tokens: int
    micro_batches: int
    warmup: int
    steps: int
    learning_rate: float
    folder: str


# ------------------------------------------------------------------------------------------------------------- devices


class Host:
    """The CPU as the device: to try the programs of contestants that run on it; nothing is offloaded."""

    accelerator = "cpu"
    collectives = backend = "gloo"  # the backend for tensors of the device, and the backend of the process group
    device = torch.device("cpu")
    pins = False

    def cap(self, nbytes: int) -> None:
        """Limit the memory of torch's allocator; does nothing on the CPU."""

    def synchronize(self) -> None:
        """Wait for the device; does nothing on the CPU."""

    def forget(self) -> None:
        """Free unused memory and reset the peaks."""

    def peaks(self) -> dict[str, float]:
        """The peaks in GiB: of tensors on the device, of its allocator, and of pinned memory."""
        return {}


class Simulated(Host):
    """The device of `tests/device`."""

    accelerator = "sim"
    collectives = "simccl"
    backend = "cpu:gloo,sim:simccl"
    pins = True

    def __init__(self) -> None:
        sys.path.append(str(ROOT / "tests"))
        self._sim = importlib.import_module("device.sim")
        self._sim.install()
        importlib.import_module("device.accelerator").register()
        self._sim.reset()
        self.device = torch.device("sim", 0)

    def cap(self, nbytes: int) -> None:
        self._sim.install().set_limit(0, nbytes)

    def synchronize(self) -> None:
        torch.accelerator.synchronize()

    def forget(self) -> None:
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()

    def peaks(self) -> dict[str, float]:
        return {
            "device_peak_gib": torch.accelerator.max_memory_allocated() / GIB,
            "device_reserved_gib": torch.accelerator.max_memory_reserved() / GIB,
            "pinned_peak_gib": REGISTERED.peak / GIB,
        }


class Cuda(Simulated):
    accelerator = "gpu"
    collectives = "nccl"
    backend = "cpu:gloo,cuda:nccl"

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)
        torch.cuda.set_device(self.device)

    def cap(self, nbytes: int) -> None:
        total = torch.cuda.get_device_properties(self.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / total), self.device)

    def forget(self) -> None:
        super().forget()
        torch.cuda.reset_peak_host_memory_stats()

    def peaks(self) -> dict[str, float]:
        own = torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0)
        return super().peaks() | {"pinned_peak_gib": (own + REGISTERED.peak) / GIB}


PLACES: dict[str, Callable[[], Host]] = {"cuda": Cuda, "sim": Simulated, "cpu": Host}


class Registered:
    """Counts bytes that were pinned by registration, which torch's allocator of pinned memory does not know."""

    def __init__(self) -> None:
        self.peak = 0
        self._sizes: dict[int, int] = {}

    def watch(self, kind: Any) -> None:
        """Count the memory that this package pins through a device type."""
        pin, unpin = kind.pin, kind.unpin

        def pinned(address: int, nbytes: int) -> None:
            pin(address, nbytes)
            self._sizes[address] = nbytes
            self.peak = max(self.peak, sum(self._sizes.values()))

        def unpinned(address: int) -> None:
            self._sizes.pop(address, None)
            unpin(address)

        kind.pin, kind.unpin = pinned, unpinned


REGISTERED = Registered()


# ---------------------------------------------------------------------------------------------------------- the model


class Recomputed(Block):
    """A block whose forward is recomputed in backward."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return out


class Model(nn.Module):
    """A GPT-like language model with learned positions; maps token numbers ([batch, tokens + 1]) to the loss."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.embedding = nn.Embedding(job.vocabulary, job.width)
        self.position = nn.Embedding(job.tokens, job.width)
        self.layers = nn.ModuleList(Recomputed(job.width, job.heads) for _ in range(job.layers))
        self.norm = nn.LayerNorm(job.width)
        self.head = nn.Linear(job.width, job.vocabulary, bias=False)

    def forward(self, batch: Tensor) -> Tensor:
        tokens = batch.shape[1] - 1
        x = self.embedding(batch[:, :-1]) + self.position(torch.arange(tokens, device=batch.device))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


class Weights:
    """Initial weights, the same in every process: 0.02 times normal numbers, rounded to bf16 and repeated periodically.

    So all contestants begin with the same weights, whether masters are made from fp32 or bf16 parameters, and 10B
    weights are made within seconds.
    """

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        self._values = (torch.randn(PERIOD, generator=draw) * 0.02).bfloat16().float()

    @torch.no_grad()
    def fill(self, parameter: Tensor, name: str, number: int) -> None:
        """Fill the parameter ``name``, which has position ``number`` in the model."""
        if parameter.dim() == 1:
            parameter.fill_(1.0 if name.endswith(("norm.weight", "first.weight", "second.weight")) else 0.0)
            return
        values = self._values.roll(7919 * number).to(parameter.device, parameter.dtype)
        for part in parameter.view(-1).split(PERIOD):
            part.copy_(values[: part.numel()])


def build(job: Job, dtype: torch.dtype = torch.bfloat16) -> Model:
    """Make the model in host memory."""
    with torch.device("meta"):
        model = Model(job).to(dtype)
    model.to_empty(device="cpu")
    weights = Weights()
    for number, (name, parameter) in enumerate(model.named_parameters()):
        weights.fill(parameter, name, number)
    return model


def batches(job: Job) -> list[Tensor]:
    """All micro-batches."""
    draw = random.Random(0)
    count = (job.warmup + job.steps) * job.micro_batches
    return [counting(draw, job.batch, job.tokens) for _ in range(count)]


def on_device(job: Job, place: Host) -> list[Tensor]:
    """All micro-batches, copied to the device before training, for loops without a loader (which favours these)."""
    return [batch.to(place.device) for batch in batches(job)]


def seconds_alone(job: Job, place: Host) -> float:
    """Seconds of forward and backward of a step's micro-batches, without other work.

    All layers share the memory of the first one's weights, but each as separate parameters, and no gradient is kept. So
    only activations and one layer take memory, while the device does the same work as for the whole model.
    """
    model = build(job._replace(layers=1)).to(place.device)
    with torch.device("meta"):
        others = [Recomputed(job.width, job.heads) for _ in range(job.layers - 1)]
    for other in others:
        other.load_state_dict(model.layers[0].state_dict(), assign=True)
        model.layers.append(other)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(forget_gradient)
    micro_batches = on_device(job, place)[: job.micro_batches]
    found = []
    for _ in range(ALONE):
        place.synchronize()
        start = time.perf_counter()
        for batch in micro_batches:
            model(batch).backward()
        place.synchronize()
        found.append(time.perf_counter() - start)
    return min(found[1:])


# --------------------------------------------------------------------------------------------------------- contestants

Run = Callable[[Job, Host, Clock], list[Tensor]]


def run_ours(job: Job, place: Host, clock: Clock) -> list[Tensor]:
    """Lightning's Trainer with `ZeroStrategy`, and torch's AdamW, which the strategy runs by native kernels."""
    import lightning_zero
    from lightning_zero.storage.accelerators import device_type

    REGISTERED.watch(device_type(place.device))
    strategy = lightning_zero.ZeroStrategy(**job.options)

    def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=job.learning_rate)

    flags: dict[str, Any] = {"accelerator": place.accelerator, "devices": 1, "precision": "bf16-true"}
    return fit(build(job), optimizer_of, batches(job), job.micro_batches, clock, strategy=strategy, **flags)


def run_fsdp2(job: Job, place: Host, clock: Clock) -> list[Tensor]:
    """`fully_shard` of every block and of the rest, with fp32 shards in pinned host memory and torch's fused AdamW.

    Gradients are copied to the host after every micro-batch, as by default; or, with the option `sums`, they are summed
    on the device, in bf16, and copied once per step.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    model = build(job, torch.float32)
    options: dict[str, Any] = {
        "mesh": init_device_mesh(place.device.type, (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        "offload_policy": CPUOffloadPolicy(pin_memory=place.pins),
    }
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.learning_rate, fused=True)
    begin: dict[str, Any] = {"begin": model.set_requires_gradient_sync} if job.options["sums"] else {}
    return plain(model, optimizer, on_device(job, place), job.micro_batches, clock, **begin)


def run_torchao(job: Job, place: Host, clock: Clock) -> list[Tensor]:
    """torchao's `CPUOffloadOptimizer` over torch's fused AdamW, for bf16 parameters, or fp32 ones under autocast.

    The former has no masters and bf16 state, and so computes less than all other contestants.
    """
    from torchao.optim import CPUOffloadOptimizer

    wide = job.options["parameters"] == "fp32"
    model = build(job, torch.float32 if wide else torch.bfloat16).to(place.device)
    optimizer = CPUOffloadOptimizer(
        model.parameters(),
        torch.optim.AdamW,
        offload_gradients=job.micro_batches == 1,  # with offloaded gradients it cannot accumulate
        lr=job.learning_rate,
        fused=True,
    )
    with torch.autocast(place.device.type, torch.bfloat16, enabled=wide):
        return plain(model, optimizer, on_device(job, place), job.micro_batches, clock)


def run_deepspeed(job: Job, place: Host, clock: Clock) -> list[Tensor]:
    """DeepSpeed's engine with its CPU Adam; at stage 3 the model is constructed in shards."""
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    deepspeed.init_distributed(place.collectives, dist_init_required=False)
    engine = Engine(batch=job.batch, micro_batches=job.micro_batches, zero=job.options)
    if job.options["stage"] == 3:
        with deepspeed.zero.Init(config_dict_or_path=engine.config()):
            model = Model(job)
        weights = Weights()
        for number, (name, parameter) in enumerate(model.named_parameters()):
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                weights.fill(parameter, name, number)
    else:
        model = build(job)
    optimizer = DeepSpeedCPUAdam(model.parameters(), lr=job.learning_rate, weight_decay=0.01, adamw_mode=True)
    return engine.run(model, optimizer, on_device(job, place), clock)


RUNS: Mapping[str, Run] = {"ours": run_ours, "fsdp2": run_fsdp2, "torchao": run_torchao, "deepspeed": run_deepspeed}


def measure(job: Job, place: Host) -> dict[str, Any]:
    place.cap(round(job.device_memory_gib * GIB))
    alone = seconds_alone(job, place)
    gc.collect()
    place.forget()
    clock = Clock(job.warmup, job.steps, place.synchronize)
    losses = RUNS[job.system](job, place, clock)
    found = clock.result()
    tokens = job.micro_batches * job.batch * job.tokens
    return {
        **found,
        "tokens_per_second": tokens / found["seconds"],
        "forward_backward_seconds": alone,
        "exposed_seconds": found["seconds"] - alone,
        **place.peaks(),
        "losses": torch.stack(losses).tolist(),
    }


def out_of_memory(error: BaseException | None) -> str:
    """The message of an error about insufficient memory of the device or the host; empty for other errors."""
    while error is not None:
        if type(error).__name__ in OUT_OF_MEMORY_TYPES or any(words in str(error) for words in OUT_OF_MEMORY):
            return f"{type(error).__name__}: {error}"
        error = error.__cause__ or error.__context__
    return ""


def attempt(job: Job, place: Host) -> dict[str, Any]:
    """Measure, and return the results or the message about insufficient memory."""
    try:
        return measure(job, place)
    except Exception as error:
        if not (message := out_of_memory(error)):
            raise
        return {"out_of_memory": message}


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    warnings.filterwarnings("ignore")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    place = PLACES[job.device]()
    # By a file, since another process may have taken a port in the meantime.
    dist.init_process_group(place.backend, init_method=f"file://{job.folder}/meet", rank=0, world_size=1)
    result = attempt(job, place)
    Path(job.folder, "rank0.json").write_text(json.dumps(result))
    sys.stdout.flush()
    if "out_of_memory" in result:
        os._exit(0)  # without cleaning up, since threads may wait for ever
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
