"""Runs one cell of `benchmarks.exposed` in its own process: trains on the simulated device and prints times as JSON.

    python -P benchmarks/exposed_cell.py '{"gpu": "a100-40", "dram": 100e9, "strategy": "zero2_offload", "scale": 64}'

`benchmarks/exposed.py` explains the scaling, and why the times are those of the large model.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the last one, so that no source hides an installed package

from benchmarks.transformer import Block
from lightning_zero import ZeroStrategy
from lightning_zero.integration.names import STRATEGIES
from lightning_zero.integration.options import StrategyOptions
from lightning_zero.storage import WORK_LOG, Lane, Phase, Ticket, staged, streams, work_log
from lightning_zero.storage.work_log import EXPOSED
from lightning_zero.update import native
from lightning_zero.update.clipping import GradientClipping

ROOT = Path(__file__).resolve().parents[1]

# The model with 10B parameters: 48 layers of width 4096, and the size of its batches.
LAYERS, HEADS, WIDTH, VOCABULARY, TOKENS, SEQUENCES = 48, 32, 4096, 50304, 1024, 16
STEPS = 5  # number of steps; one is measured, after the first ones, which allocate
MEASURED = 3  # number of the measured step, from 0
LAUNCH = 5e-6  # seconds of each operation on the device in addition to its work, at every scale
NAMES = {0: "none", 1: "compute", 2: "to_device", 3: "to_host", 4: "network"}  # of the device's resources

Job = dict[str, Any]


class GPT(L.LightningModule):
    """Pre-norm blocks, each recomputed in backward; input and output embeddings are tied."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        scale = job["scale"]
        self.width, self.vocabulary, self.tokens = WIDTH // scale, VOCABULARY // scale, TOKENS // scale
        self.embedding = nn.Embedding(self.vocabulary, self.width)
        self.positions = nn.Embedding(self.tokens, self.width)
        self.blocks = nn.ModuleList(Block(self.width, HEADS) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(self.width)

    def training_step(self, tokens: Tensor, index: int = 0) -> Tensor:
        x = self.embedding(tokens) + self.positions.weight
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Host:
    """The host's memory in virtual time: update kernels take the time for their bytes and for those of copies.

    Attributes:
        seconds: total time of the kernels.
        copied: bytes copied over PCIe, by direction.
    """

    def __init__(self, c: Any, rate: float, copied_per_element: float) -> None:
        self.seconds = 0.0
        self.copied: Counter[Lane] = Counter()
        self._c, self._rate, self._copied_per_element = c, rate, copied_per_element

    def kernel(self, tensors: Sequence[Tensor], written: Sequence[Tensor | None]) -> None:
        """Advances the clock by the time in which ``tensors`` are read and ``written`` ones are written."""
        nbytes = sum(t.nbytes for t in (*tensors, *(w for w in written if w is not None)))
        seconds = (nbytes + self._copied_per_element * tensors[0].numel()) / self._rate
        self._c.host_works(seconds)
        self.seconds += seconds


def charge_kernels(host: Host) -> None:
    """Makes updates of masters in host memory advance the clock of the calling thread."""
    update = native.AdamRule.update

    def charged(self: Any, param: Tensor, states: Sequence[Tensor], grad: Tensor, *args: Any, **options: Any) -> None:
        update(self, param, states, grad, *args, **options)
        if param.numel() and param.device.type == "cpu":
            remainder = options.get("remainder")
            changed = [param, *states, *([] if remainder is None else [remainder])]
            host.kernel([*changed, grad], [*changed, options.get("copy_out")])

    native.AdamRule.update = charged  # type: ignore[method-assign]


class Begin:
    """The first ticket that a thread's job waits for; it sets the thread's clock to the time when the job can begin."""

    def __init__(self, begin: Callable[[], None]) -> None:
        self._begin = begin

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        self._begin()

    def synchronize(self) -> None:
        self._begin()


class Order:
    """Makes threads request copies in the order of their clocks, since the copies of a lane are served in turn.

    A thread continues when no other running thread can still request a copy at an earlier time.

    Args:
        now: returns the clock of the calling thread.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._changed = threading.Condition()
        self._clocks: defaultdict[str, float] = defaultdict(float)  # last seen clocks; for a lane, when it is free
        self._jobs: defaultdict[str, deque[float]] = defaultdict(deque)  # earliest begins of the jobs of each lane
        self._awaited: dict[str, Future[Any]] = {}

    @staticmethod
    def _caller() -> str:
        name = threading.current_thread().name
        return name if name.startswith("lane ") else "training"

    def note(self) -> None:
        with self._changed:
            self._clocks[self._caller()] = self._now()
            self._changed.notify_all()

    def submit(self, lane: Lane) -> None:
        """Notes that a job of a lane can begin now."""
        self.note()
        with self._changed:
            self._jobs[f"lane {lane.name}"].append(self._now())

    def begin(self, lane: Lane, clock: Any) -> None:
        """Begins the lane's next job, at the time when the job could begin and the lane was free."""
        name = f"lane {lane.name}"
        with self._changed:
            clock.host_apart(max(self._clocks[name], self._jobs[name][0]))
        self.note()

    def end(self, lane: Lane) -> None:
        self.note()
        with self._changed:
            self._jobs[f"lane {lane.name}"].popleft()

    @contextmanager
    def waiting(self, job: Future[Any]) -> Iterator[None]:
        """A context for a wait of the caller for a job."""
        self.note()
        with self._changed:
            self._awaited[self._caller()] = job
            self._changed.notify_all()
        yield
        with self._changed:
            del self._awaited[self._caller()]

    def turn(self) -> None:
        """Waits until it is the caller's turn."""
        self.note()
        with self._changed:
            while any(self._earlier(name) for name in ("training", *self._jobs)):
                self._changed.wait(0.01)

    def _earlier(self, name: str) -> bool:
        if name == self._caller() or (name in self._awaited and not self._awaited[name].done()):
            return False
        if name == "training":
            return self._clocks[name] < self._now()
        return bool(self._jobs[name]) and max(self._clocks[name], self._jobs[name][0]) < self._now()


class ClockedWork(streams._Work):
    """A job; waiting for it moves the host's clock to the job's end."""

    clock: Any
    order: Order
    ends: list[float]

    def marks(self) -> list[Any]:
        with self.order.waiting(self._ended):
            found = super().marks()
            self.clock.host_reaches(self.ends[0])
        self.order.note()
        return found


class ClockedExecutor(streams.StreamExecutor):
    """An executor whose threads have clocks: a job begins after it was submitted and the previous one has ended."""

    host: Host
    clock: Any

    def __init__(self, device: torch.device, in_flight_bytes: int, staging_bytes: int) -> None:
        super().__init__(device, in_flight_bytes, staging_bytes)
        self._order = Order(self.clock.now)

    def _in_thread(self, lane: Lane, job: Callable[[], object], what: str, after: Sequence[Ticket]) -> Any:
        order, ends = self._order, list[float]()

        def timed() -> None:
            try:
                job()
            finally:
                ends.append(self.clock.now())
                order.end(lane)

        order.submit(lane)
        begin = Begin(lambda: order.begin(lane, self.clock))
        work = super()._in_thread(lane, timed, what, (begin, *after))
        made = ClockedWork(self, lane, what, work._ended)
        made.clock, made.order, made.ends = self.clock, order, ends
        return made

    def _copy(self, lane: Lane, target: Tensor, source: Tensor, what: str, after: Sequence[Ticket]) -> Any:
        self._order.turn()
        self.host.copied[lane] += target.nbytes
        return super()._copy(lane, target, source, what, after)


def measure_in_turn(clipping: Any) -> tuple[Any, Any]:
    """Runs the small all-reduce of a step after threads have done the work that comes earlier in virtual time.

    The host waits for the device in it anyway. Otherwise a copy of the host right before it would be served on PCIe
    before copies that a thread, whose clock is behind the host's, requests later but for an earlier time.
    """
    torch.accelerator.current_stream().synchronize()
    clipping._placement.executor._order.turn()
    return ALL_REDUCE(clipping)


ALL_REDUCE = GradientClipping._all_reduce


class Marks(L.Callback):
    """Notes when steps begin, in virtual time, and logs one of them."""

    def __init__(self, c: Any, host: Host, device: torch.device) -> None:
        self.begins: list[float] = []
        self.spans: list[Any] = []
        self._c, self._host, self._device = c, host, device
        self._events: list[torch.Event] = []
        self._zero = torch.Event(device=device, enable_timing=True)  # at the start of the clock
        self._zero.record()
        self.logged = 0.0
        self.host_seconds = 0.0
        self.copied: Counter[Lane] = Counter()
        self.peak = 0

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        step = trainer.global_step
        event = torch.Event(device=self._device, enable_timing=True)
        event.record()
        self._events.append(event)
        if step == MEASURED - 1:
            self._recording = WORK_LOG.start(self._device, Phase.OTHER)
            self._before = self._host.seconds, Counter(self._host.copied)
        if step == MEASURED + 1:
            self.host_seconds = (self._host.seconds - self._before[0]) / 2
            copied = self._host.copied - self._before[1]
            self.copied = Counter({lane: nbytes // 2 for lane, nbytes in copied.items()})

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        trainer.strategy.engine.await_updates()  # type: ignore[attr-defined]
        logged, _ = self._recording.zero
        self.spans = self._recording.stop()
        self.begins = [self._zero.elapsed_time(event) / 1e3 for event in self._events]
        self.logged = self._zero.elapsed_time(logged) / 1e3
        self.peak = torch.accelerator.max_memory_allocated(self._device)


def bare_seconds(c: Any, job: Job, device: torch.device) -> tuple[float, float]:
    """Seconds of forward, and of forward and backward, with all parameters on the device and no other work."""
    module = GPT(job).to(device, torch.bfloat16)
    tokens = torch.zeros(SEQUENCES, module.tokens, dtype=torch.long, device=device)
    for _ in range(2):
        torch.accelerator.synchronize()
        start = c.now()
        loss = module.training_step(tokens)
        torch.accelerator.synchronize()
        between = c.now()
        loss.backward()
        torch.accelerator.synchronize()
        seconds = between - start, c.now() - start
        module.zero_grad()
    return seconds


def set_rates(c: Any, job: Job) -> None:
    """Sets the machine's rates, divided like the model: bytes by the square of the scale, products by its cube."""
    costs, square = c.costs(), job["scale"] ** 2
    costs.launch, costs.memory, costs.flops = LAUNCH, job["hbm"] / square, job["flops"] / (square * job["scale"])
    costs.to_device = costs.to_host = job["pcie"] / square
    costs.network = job["network"] / square


def measure(job: Job) -> dict[str, Any]:
    sys.path.append(str(ROOT / "tests"))
    sim, accelerator = importlib.import_module("device.sim"), importlib.import_module("device.accelerator")
    torch.manual_seed(0)
    c = sim.install()
    accelerator.register()
    sim.reset()
    c.clocked(True)
    device = torch.device(sim.DEVICE, 0)
    set_rates(c, job)
    square = job["scale"] ** 2
    bare = bare_seconds(c, job, device)
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    c.reset_clock()

    options = dict(STRATEGIES[job["strategy"]]) | job.get("options", {})
    split = options.get("master_layout") == "split" and options["stage"] < 3
    copied = 6.0 if options["stage"] == 3 or split else 4.0
    host = Host(c, job["dram"] / square, copied)
    charge_kernels(host)
    ClockedExecutor.host, ClockedExecutor.clock = host, c
    streams.StreamExecutor = ClockedExecutor  # type: ignore[misc]
    GradientClipping._all_reduce = measure_in_turn  # type: ignore[method-assign]
    staged._LARGEST_TILE //= square
    work_log.time = SimpleNamespace(perf_counter=c.now)  # type: ignore[assignment]
    defaults = StrategyOptions()  # whose sizes are scaled with the model
    for name in ("bucket_size_mb", "max_in_flight_mb", "staging_buffer_mb", "prefetch_mb"):
        options[name] = options.get(name, getattr(defaults, name)) / square
    strategy = ZeroStrategy(
        **options,
        persistence_numel=defaults.persistence_numel // job["scale"],
        check_steps=0,
        preflight="off",
    )
    module = GPT(job)
    tokens = torch.zeros(STEPS, SEQUENCES, module.tokens, dtype=torch.long, device=device)
    marks = Marks(c, host, device)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            f"cpu:gloo,{sim.DEVICE}:{sim.BACKEND}", init_method=f"file://{folder}/meet", rank=0, world_size=1
        )
        trainer = L.Trainer(
            strategy=strategy,
            accelerator=sim.DEVICE,
            devices=1,
            max_epochs=1,
            precision="bf16-true",
            gradient_clip_val=None if options.get("update_in_backward") else 1.0,
            callbacks=[marks],
            **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
        )
        c.trace(True)
        trainer.fit(module, DataLoader(tokens, batch_size=None))
        c.trace(False)
    numel = sum(p.numel() for p in module.parameters())
    return described(c, job, marks, bare, numel)


def described(c: Any, job: Job, marks: Marks, bare: tuple[float, float], numel: int) -> dict[str, Any]:
    square, (forward, compute) = job["scale"] ** 2, bare
    start, stop = marks.begins[MEASURED], marks.begins[MEASURED + 1]
    step = stop - start
    busy: Counter[str] = Counter()
    for _, _, _, resource, begin, end in c.spans():
        busy[NAMES[resource]] += max(0.0, min(end, stop) - max(begin, start))
    zero = marks.logged
    exposed: Counter[str] = Counter()
    waits: Counter[str] = Counter()
    slices = []
    for span in marks.spans:
        begin, end = (zero + moment for moment in (span.start, span.end))
        within = min(end, stop) - max(begin, start)
        if within > 0:
            slices.append([span.track, span.lane, str(span.name), begin - start, end - start])
            if span.track == EXPOSED:
                exposed[span.lane] += within
                waits[f"{span.lane}: {span.name}"] += within
    copies = max(busy["to_device"], busy["to_host"])
    bound = max(compute, marks.host_seconds, copies)
    in_backward = job.get("options", {}).get("update_in_backward")
    exact = bound if in_backward else max(compute + max(0.0, marks.host_seconds - forward), copies)
    return {
        "step": step,
        "steps": [after - before for before, after in zip(marks.begins, marks.begins[1:], strict=False)],
        "forward": forward,
        "compute": compute,
        "on_device": busy["compute"],
        "host": marks.host_seconds,
        "to_device": busy["to_device"],
        "to_host": busy["to_host"],
        "bound": bound,
        "ratio": step / bound,
        "exact": exact,
        "ratio_to_exact": step / exact,
        "exposed": dict(exposed),
        "waits": dict(waits.most_common(12)),
        "copied_bytes_per_parameter": {lane.name: nbytes / numel for lane, nbytes in marks.copied.items()},
        "device_peak_gb": marks.peak * square / 1e9,
        "parameters": numel * square,
        **({"slices": slices} if job.get("slices") else {}),
    }


def main() -> None:
    print(json.dumps(measure(json.loads(sys.argv[1]))))


if __name__ == "__main__":
    main()
