"""Two ranks with devices, over NCCL where each has one and over gloo where they share one; and what a GPU does at once.

On the simulated device the two ranks have one each.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from device.test_overlap import BF16, Case, left_by, start
from device.where import DevicePool, device_of_rank
from engine import driver
from helpers import models
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from lightning_zero.sharding import Mesh
from lightning_zero.storage import Executor, InlineExecutor, StreamExecutor

STEPS, MICRO = 3, 2
CASES = [Case(1), Case(2), Case(2, host=False), Case(3), Case(3, host=False, prefetch_mb=1.0)]


def train(case: Case, kind: str, overlap: bool) -> tuple[list[Tensor], list[float]]:
    """What two ranks' training in float64 leaves, with an edit and a read by user code after a step; and the norms."""
    device = torch.device(kind) if kind == "cpu" else device_of_rank(kind)
    executor: Executor = StreamExecutor(device) if overlap else InlineExecutor()
    mesh = Mesh.create()
    session, norms, saw = start(case, executor, device, models.make_model("transformer").double(), mesh), [], []
    engine, weight = session.engine, next(session.model.parameters())
    for micro in models.make_batches(STEPS, MICRO, mesh.world.size):
        batches = [of_ranks[mesh.world.rank].to(device) for of_ranks in micro]
        norm = driver.run_step(session, batches, clip_norm=0.3)
        assert norm is not None
        norms.append(norm)
        engine.end_step(reads=False)
        with engine.gathered([weight]), torch.no_grad():
            weight.mul_(1.25)
        saw.append(engine.full_param(weight).cpu())
    return [*saw, *left_by(session)], norms


@pytest.mark.device("lazy")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_ranks_on_devices_train_as_two_on_processors(device_pool2: DevicePool, case: Case) -> None:
    where = device_pool2.where
    inline, norms = device_pool2.run(train, case, where.type, overlap=False)[0]
    overlapped, same_norms = device_pool2.run(train, case, where.type, overlap=True)[0]
    on_cpu, expected_norms = device_pool2.run(train, case, "cpu", overlap=False)[0]
    rounding = {"rtol": 0.0, "atol": 0.0} if where.simulated else {"rtol": 1e-9, "atol": 1e-12}
    torch.testing.assert_close(overlapped, inline, **rounding)
    assert same_norms == pytest.approx(norms, rel=rounding["rtol"], abs=0.0)
    # A backend of a device sums in an order of its own.
    torch.testing.assert_close(overlapped, on_cpu, rtol=1e-6, atol=1e-9)
    assert norms == pytest.approx(expected_norms, rel=1e-9)


# ------------------------------------------------------------------------------------------- what torch's profiler sees

# A layer's backward must take longer than what the host does to start it, and its forward longer than its update:
# otherwise the device has nothing to do while copies run.
WIDTH, DEPTH, ROWS = 2048, 8, 1 << 16
SMALL = 1 << 20  # bytes: scalars and flags may be copied anyhow


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for _ in range(4):  # takes time, and no memory
                self.up(x)
        return x + torch.tanh(self.up(x))


class Span(NamedTuple):
    """Of a kernel or a copy on the device, in microseconds."""

    name: str
    stream: int
    start: float
    stop: float
    nbytes: int

    def beside(self, other: Span) -> bool:
        return self.stream != other.stream and self.start < other.stop and other.start < self.stop


def spans(trace: Path, category: str) -> list[Span]:
    """All of a category of events in a trace of torch's profiler."""
    events: list[dict[str, Any]] = [e for e in json.loads(trace.read_text())["traceEvents"] if e.get("cat") == category]
    return [
        Span(e["name"], e["args"]["stream"], e["ts"], e["ts"] + e["dur"], int(e["args"].get("bytes", 0)))
        for e in events
    ]


def share_beside(copies: Sequence[Span], kernels: Sequence[Span]) -> float:
    """The part of the copies that has a kernel of another stream at the same time."""
    return sum(any(copy.beside(kernel) for kernel in kernels) for copy in copies) / len(copies)


def profiled(case: Case, device: torch.device, trace: Path, mesh: Mesh | None = None) -> None:
    """Writes a trace of three steps in the steady state."""
    model = nn.Sequential(*(Layer() for _ in range(DEPTH)))
    session = start(case, StreamExecutor(device), device, model, mesh, bucket_size_mb=2.0)
    batch = torch.randn(ROWS, WIDTH, device=device, dtype=torch.bfloat16)

    def step() -> None:
        driver.run_step(session, [batch], lambda model, x: model(x).float().square().mean())
        session.engine.end_step(reads=False)

    step()
    session.engine.settle()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(3):
            step()
        session.engine.settle()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(trace))


@pytest.mark.gpu
@pytest.mark.parametrize("stage", [2, 3])
def test_copies_run_beside_kernels(stage: int, tmp_path: Path) -> None:
    """Of gradients that leave under backward, and of parameters that come back under the next forward."""
    trace = tmp_path / "trace.json"
    profiled(Case(stage, precision=BF16, prefetch_mb=64.0), torch.device("cuda", 0), trace)
    kernels, copies = spans(trace, "kernel"), [copy for copy in spans(trace, "gpu_memcpy") if copy.nbytes >= SMALL]
    assert not [copy.name for copy in copies if "Pageable" in copy.name]
    for direction in ("DtoH", "HtoD"):
        found = [copy for copy in copies if direction in copy.name]
        assert len(found) >= 3 * (DEPTH - 1)
        assert share_beside(found, kernels) >= 0.5, direction


def collectives_beside(stage: int, folder: Path) -> dict[str, float]:
    """The parts of NCCL's kernels that run beside those of the model, by collective."""
    device, mesh = device_of_rank("cuda"), Mesh.create()
    profiled(Case(stage, precision=BF16, prefetch_mb=64.0), device, trace := folder / f"{mesh.world.rank}.json", mesh)
    kernels = spans(trace, "kernel")
    computing = [kernel for kernel in kernels if not kernel.name.startswith("nccl")]
    found = {name: [k for k in kernels if k.name.startswith("nccl") and name in k.name] for name in COLLECTIVES}
    return {name: share_beside(each, computing) for name, each in found.items() if each}


COLLECTIVES = ("ReduceScatter", "AllGather")


@pytest.mark.gpu
@pytest.mark.device
@pytest.mark.parametrize("stage", [2, 3])
def test_collectives_run_beside_kernels(device_pool2: DevicePool, stage: int, tmp_path: Path) -> None:
    """Reductions under backward, and gathers of what comes from the host or was updated there."""
    if device_pool2.where.simulated or torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs: NCCL takes one rank for each")
    for shares in device_pool2.run(collectives_beside, stage, tmp_path):
        assert set(shares) == set(COLLECTIVES)
        assert min(shares.values()) >= 0.5, shares
