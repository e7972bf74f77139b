"""Compares AdamW's step on a CPU by torch, DeepSpeed and this package with the bandwidth of the memory.

    python -m benchmarks.cpu_optimizers
    python -m benchmarks.cpu_optimizers --numel 16e6 --threads 1 --rounds 5 --isas scalar avx2 avx512

The optimizers update one flat tensor, as ZeRO does, in one process. In every round each contestant takes one step; the
order rotates by one place per round. Ratios are computed from times of the same round, because the speed of a machine
drifts. Before the measurement, one step of each contestant is compared with the formula in double precision.

- torch: `torch.optim.AdamW` with foreach=False, foreach=True and fused=True, in fp32.
- deepspeed: `DeepSpeedCPUAdam` in fp32; and the passes of the optimizer of its ZeRO-2 offload on the CPU in `step`
  (0.19.8, `runtime/zero/stage_1_and_2.py`): `mul_` of the fp32 gradient by 1 / (loss scale x clipping), which runs with
  its default of gradient_clipping = 1.0 whether it clips or not, the fp32 step, and `copy_` of the master to a 16-bit
  buffer. The gradient was cast on the GPU and arrives as fp32; that pass belongs to the transfer and is not counted.
  The variant without the first pass is what it does with gradient_clipping = 0 and no loss scale.
- ours: the same fp32 step; and steps that read a bf16 gradient, scale it and write bf16 parameters in one pass, over
  an fp32 master or a master split into the bf16 parameter and 16 more bits, with moments in fp32, bf16 or 8 bits.
- STREAM: reads and writes the same arrays in the same way, with one addition as arithmetic (`benchmarks/stream.py`).

Bytes per parameter are the bytes that the passes over the arrays need; torch's loops move more, because of temporaries.
All arrays lie in anonymous mappings, with huge pages if the kernel grants them, and are shared by contestants with the
same layout. DeepSpeed must be installed with its cpu_adam op, or with ninja and a compiler to build it. Without
DeepSpeed or a C compiler, their rows and the ratios to them are missing.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.environment import describe
from benchmarks.stream import BLOCK, LAYOUTS, Layout, Stream
from lightning_zero import ops
from lightning_zero.storage.host import HostStore

ROOT = Path(__file__).parents[1]
LR, BETAS, EPS, WEIGHT_DECAY = 1e-4, (0.9, 0.999), 1e-8, 0.01
HYPERPARAMETERS: dict[str, Any] = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}
START = 9  # number of earlier steps that the optimizer states pretend to have
CHECKED = 1 << 23  # number of elements in the check before the measurement: enough for stores that bypass the caches
FILLED = 1 << 22  # number of elements that are filled at a time, so that temporaries stay small
PAUSE = 0.02  # seconds before each measurement, since OpenMP's threads spin for a while after their work
CUT = ("torch for-loop", "torch foreach")  # the contestants whose bars are cut at the chart's edge
# Passes over memory of a step, as bytes per parameter; the gradient is read, everything else read and written.
TRAFFIC: dict[Layout, float] = {
    "fp32": 4 + 3 * 8,
    "fp32_copy": 2 + 3 * 8 + 2,
    "split": 2 + 2 * 4 + 2 * 8,
    "fp32_copy_half": 2 + 8 + 2 * 4 + 2,
    "split_half": 2 + 2 * 4 + 2 * 4,
    "split_byte": 2 + 2 * 4 + 2 * 2 * (1 + 1 / ops.BLOCK),
}
OURS: dict[Layout, str] = {
    "fp32": "fp32",
    "fp32_copy": "bf16 in and out, fp32 master and moments",
    "split": "bf16 in, split master, fp32 moments",
    "fp32_copy_half": "bf16 in and out, fp32 master, bf16 moments",
    "split_half": "bf16 in, split master, bf16 moments",
    "split_byte": "bf16 in, split master, 8-bit moments",
}


class Arrays:
    """The state of one flat tensor in every layout, [numel] each, with equal numbers in each layout.

    The gradients are bf16 numbers and the moments 8-bit numbers, which wider formats represent too. `reset` restores
    the initial values.
    """

    def __init__(self, numel: int) -> None:
        store = HostStore()
        half, full = torch.bfloat16, torch.float32
        self.param, self.grad = store.zeros(numel, full), store.zeros(numel, full)
        self.exp_avg, self.exp_avg_sq = store.zeros(numel, full), store.zeros(numel, full)
        self.grad_half, self.copy = store.zeros(numel, half), store.zeros(numel, half)
        self.high, self.remainder = store.zeros(numel, half), store.zeros(numel, torch.int16)
        self.exp_avg_half, self.exp_avg_sq_half = store.zeros(numel, half), store.zeros(numel, half)
        self.exp_avg_codes, self.exp_avg_sq_codes = store.zeros(numel, torch.int8), store.zeros(numel, torch.int8)
        blocks = ops.count_blocks(0, numel)
        self.exp_avg_scales, self.exp_avg_sq_scales = store.zeros(blocks, torch.uint8), store.zeros(blocks, torch.uint8)
        for array in vars(self).values():
            ops.zero_(array)  # each part is first touched by the thread that will process it
        self.reset()

    def reset(self) -> None:
        generator = torch.Generator().manual_seed(0)
        for start in range(0, self.param.numel(), FILLED):
            part = {name: array[start : start + FILLED] for name, array in vars(self).items()}
            part["param"].normal_(std=0.02, generator=generator)
            part["grad"].normal_(std=1e-3, generator=generator)
            part["exp_avg"].normal_(std=1e-3, generator=generator)
            part["exp_avg_sq"].uniform_(1e-7, 1e-6, generator=generator)
            part["grad"].copy_(part["grad_half"].copy_(part["grad"]))
            part["copy"].zero_()
            ops.split_(part["param"], part["high"], part["remainder"])
        wide, halves = (self.exp_avg, self.exp_avg_sq), (self.exp_avg_half, self.exp_avg_sq_half)
        for whole, narrow, blocks, signed in zip(wide, halves, self.blocks, (True, False), strict=True):
            ops.quantize_(whole, blocks, signed=signed)
            ops.dequantize_(whole, blocks, signed=signed)
            narrow.copy_(whole)

    @property
    def blocks(self) -> tuple[ops.Quantized, ops.Quantized]:
        """The 8-bit moments."""
        first = ops.Quantized(self.exp_avg_codes, self.exp_avg_scales)
        return first, ops.Quantized(self.exp_avg_sq_codes, self.exp_avg_sq_scales)

    def joined(self) -> Tensor:
        """The split master as fp32."""
        whole = torch.empty_like(self.param)
        ops.join_(whole, self.high, self.remainder)
        return whole

    def in_layout(self, layout: Layout) -> dict[str, Any]:
        """The arrays of a layout, by the names in `Stream.run`."""
        split = layout.startswith("split")
        states = {
            "half": (self.exp_avg_half, self.exp_avg_sq_half),
            "byte": (self.exp_avg_codes, self.exp_avg_sq_codes),
        }
        return {
            "param": self.high if split else self.param,
            "second": self.remainder if split else None if layout == "fp32" else self.copy,
            "states": states.get(layout.rpartition("_")[2], (self.exp_avg, self.exp_avg_sq)),
            "grad": self.grad if layout == "fp32" else self.grad_half,
        }


@dataclass(frozen=True)
class Contestant:
    """One way to take a step.

    Attributes:
        name: unique name.
        traffic: bytes per parameter that its passes read and write.
        layout: layout of the STREAM that it is compared with.
        step: takes a step; its argument is the factor of the gradient, which torch's and DeepSpeed's own steps ignore.
        scales: whether this argument has an effect.
        updated: returns the parameter after the step, in fp32; None for a STREAM.
        copy: the 16-bit parameter, if the contestant writes one.
        tolerance: tolerance of the check, relative to the largest update.
    """

    name: str
    traffic: float
    layout: Layout
    step: Callable[[float], None]
    scales: bool = False
    updated: Callable[[], Tensor] | None = None
    copy: Tensor | None = None
    tolerance: float = 1e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    fast = [name for name in ops.supported_isas() if name != "scalar"] or ["scalar"]
    parser.add_argument("--numel", type=float, default=64e6, help="elements, by default %(default).0f")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=15, help="that count; one more comes before them")
    parser.add_argument("--isas", nargs="+", default=fast, choices=ops.supported_isas(), help="default: all but scalar")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/cpu_optimizers.json")
    options = parser.parse_args()
    numel = int(options.numel) // BLOCK * BLOCK

    environment = describe() | {"transparent_huge_pages": _huge_pages_setting(), "isa": ops.isa()}
    stream, environment["stream"] = load_stream()
    deepspeed, environment["deepspeed"] = load_deepspeed()
    kinds = partial(contestants, isas=options.isas, stream=stream, deepspeed=deepspeed)
    small = Arrays(min(numel, CHECKED))
    check(kinds(small, threads=max(options.threads)), small)
    if stream is not None:
        check_stream(stream, small, max(options.threads))
    del small
    arrays = Arrays(numel)
    environment["huge_page_gib"] = _huge_page_gib()

    result: dict[str, Any] = {"environment": environment, "numel": numel, "rounds": options.rounds, "runs": {}}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for threads in options.threads:
        torch.set_num_threads(threads)
        field = kinds(arrays, threads=threads)
        seconds = measure(field, options.rounds)
        run = {"rows": rows(field, seconds, numel), "ratios": ratios(seconds, options.isas), "seconds": seconds}
        result["runs"][str(threads)] = run
        title = f"{numel / 1e6:g} million parameters, {threads} thread(s), {options.rounds} rounds"
        print(f"\n{title}\n\n{table(run)}", flush=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    plot(result, options.out.with_suffix(".png"))
    print(f"\n{options.out}, {options.out.with_suffix('.png').name}")


def load_stream() -> tuple[Stream | None, str]:
    """STREAM, and its compiler or the reason why there is none."""
    if shutil.which("cc") is None:
        print("no C compiler (cc): without STREAM")
        return None, "no C compiler"
    stream = Stream()
    return stream, stream.compiler


def load_deepspeed() -> tuple[Any, str]:
    """DeepSpeedCPUAdam, and its version and flags or the reason why it cannot be used."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
        from deepspeed.ops.op_builder import CPUAdamBuilder

        CPUAdamBuilder().load()
    except (ImportError, RuntimeError, OSError) as error:
        print(f"without DeepSpeed: {type(error).__name__}: {error}")
        return None, f"{type(error).__name__}: {error}"
    return DeepSpeedCPUAdam, f"{version('deepspeed')} {' '.join(CPUAdamBuilder().cxx_args())}"


def contestants(
    arrays: Arrays, threads: int, isas: Sequence[str], stream: Stream | None, deepspeed: Any
) -> list[Contestant]:
    """All contestants, on the same arrays."""
    field = torch_contestants(arrays)
    if deepspeed is not None:
        field += deepspeed_contestants(arrays, deepspeed)
    field += [our_contestant(arrays, layout, target, threads) for layout in LAYOUTS for target in isas]
    if stream is not None:
        for layout in LAYOUTS:
            run = partial(stream.run, layout, **arrays.in_layout(layout), threads=threads)
            step: Callable[[float], None] = partial(_without_factor, run)
            field.append(Contestant(stream_name(layout), TRAFFIC[layout], layout, step))
    return field


def torch_contestants(arrays: Arrays) -> list[Contestant]:
    kinds: dict[str, dict[str, Any]] = {
        "torch for-loop": {"foreach": False},
        "torch foreach": {"foreach": True},
        "torch fused": {"fused": True},
    }
    field = []
    for name, arguments in kinds.items():
        param = _parameter(arrays)
        optimizer = torch.optim.AdamW([param], **HYPERPARAMETERS, **arguments)
        optimizer.state[param] = _state(arrays, torch.tensor(float(START)))
        step = partial(_without_factor, optimizer.step)
        field.append(Contestant(name, TRAFFIC["fp32"], "fp32", step, updated=lambda: arrays.param))
    return field


def deepspeed_contestants(arrays: Arrays, adam: Any) -> list[Contestant]:
    def kernel() -> Any:
        param = _parameter(arrays)
        optimizer = adam([param], **HYPERPARAMETERS, adamw_mode=True)
        optimizer.state[param] = _state(arrays, START)
        return optimizer

    only, copying, whole = kernel(), kernel(), kernel()

    def step_and_copy(factor: float) -> None:
        copying.step()
        arrays.copy.copy_(arrays.param)

    def chain(factor: float) -> None:
        arrays.grad.mul_(torch.tensor(factor))
        whole.step()
        arrays.copy.copy_(arrays.param)

    bytes_of_step = TRAFFIC["fp32"]
    field = partial(Contestant, layout="fp32", updated=lambda: arrays.param)
    return [
        field("deepspeed kernel", bytes_of_step, step=partial(_without_factor, only.step)),
        field("deepspeed step, cast", bytes_of_step + 6, step=step_and_copy, copy=arrays.copy),
        field("deepspeed chain: scale, step, cast", bytes_of_step + 14, step=chain, copy=arrays.copy, scales=True),
    ]


def our_contestant(arrays: Arrays, layout: Layout, target: str, threads: int) -> Contestant:
    tensors = arrays.in_layout(layout)
    split, half = layout.startswith("split"), layout.endswith("half")
    second: dict[str, Any] = {"remainder" if split else "copy_out": tensors["second"]}
    exp_avg, exp_avg_sq = arrays.blocks if layout.endswith("byte") else tensors["states"]
    count = itertools.count(START + 1)

    def step(factor: float) -> None:
        ops.adamw_(
            tensors["param"],
            exp_avg,
            exp_avg_sq,
            tensors["grad"],
            **HYPERPARAMETERS,
            step=next(count),
            grad_scale=factor,
            isa=target,
            threads=threads,
            **second,
        )

    return Contestant(
        our_name(layout, target),
        TRAFFIC[layout],
        layout,
        step,
        scales=True,
        updated=arrays.joined if split else lambda: arrays.param,
        copy=None if split else tensors["second"],
        tolerance=0.03 if half else 1e-3,  # a rounding of each moment to bf16, stochastically
    )


def our_name(layout: Layout, target: str) -> str:
    return f"ours {target}: {OURS[layout]}"


def stream_name(layout: Layout) -> str:
    return f"STREAM: {OURS[layout]}"


def check(field: Sequence[Contestant], arrays: Arrays) -> None:
    """Check that a step of each contestant, with a factor if it uses one, agrees with the formula.

    Args:
        field: contestants on `arrays`.
        arrays: their state, which is reset for each.

    Raises:
        RuntimeError: a contestant's result differs by more than its tolerance.
    """
    for contestant in field:
        if contestant.updated is None:
            continue
        arrays.reset()
        factor = 0.5 if contestant.scales else 1.0
        before, expected = arrays.param.double(), _formula(arrays, factor)
        contestant.step(factor)
        after = contestant.updated()
        error, update = (after - expected).abs().max().item(), (expected - before).abs().max().item()
        if not error <= contestant.tolerance * update:
            raise RuntimeError(f"{contestant.name} is off by {error:.3g} where the largest update is {update:.3g}")
        if contestant.copy is not None and not torch.equal(contestant.copy, after.to(contestant.copy.dtype)):
            raise RuntimeError(f"{contestant.name} wrote a 16-bit parameter that is not the rounded master")


def _formula(arrays: Arrays, factor: float) -> Tensor:
    """The next parameter in double precision."""
    param, grad = arrays.param.double(), arrays.grad.double() * factor
    exp_avg, exp_avg_sq = arrays.exp_avg.double(), arrays.exp_avg_sq.double()
    exp_avg.lerp_(grad, 1 - BETAS[0])
    exp_avg_sq.mul_(BETAS[1]).addcmul_(grad, grad, value=1 - BETAS[1])
    correction, correction_sq = (1 - beta ** (START + 1) for beta in BETAS)
    denominator = (exp_avg_sq / correction_sq).sqrt_().add_(EPS)
    updated: Tensor = param.mul_(1 - LR * WEIGHT_DECAY).addcdiv_(exp_avg, denominator, value=-LR / correction)
    return updated


def check_stream(stream: Stream, arrays: Arrays, threads: int) -> None:
    """Raise unless STREAM reads and writes every element of every array."""
    for layout in LAYOUTS:
        for mask in (0, 0xFFFFFFFF):
            arrays.reset()
            tensors = arrays.in_layout(layout)
            changed = [tensors["param"], *tensors["states"]]
            if layout.startswith("split"):
                changed.append(tensors["second"])
            added = _unsigned(tensors["grad"]) & mask
            expected = [_unsigned(array) + added for array in changed]
            stream.run(layout, **tensors, threads=threads, mask=mask)
            wrong = [k for k, (array, sum_) in enumerate(zip(changed, expected, strict=True)) if not _same(array, sum_)]
            if wrong or ("copy" in layout and not _same(arrays.copy, _unsigned(arrays.param) >> 16)):
                raise RuntimeError(f"STREAM in the layout {layout} with mask {mask:#x} missed arrays {wrong or 'copy'}")


def _unsigned(array: Tensor) -> Tensor:
    bits: Tensor = array.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[array.itemsize]).long()
    return bits & ((1 << 8 * array.itemsize) - 1)


def _same(array: Tensor, bits: Tensor) -> bool:
    return torch.equal(_unsigned(array), bits & ((1 << 8 * array.itemsize) - 1))


def measure(field: Sequence[Contestant], rounds: int) -> dict[str, list[float]]:
    """The seconds of each contestant's step in every round, except a first round for warm-up."""
    seconds: dict[str, list[float]] = {contestant.name: [] for contestant in field}
    gc.collect()
    gc.disable()
    try:
        for turn in range(rounds + 1):
            first = turn % len(field)
            for contestant in (*field[first:], *field[:first]):
                time.sleep(PAUSE)
                begin = time.perf_counter()
                contestant.step(1.0)
                end = time.perf_counter()
                if turn > 0:
                    seconds[contestant.name].append(end - begin)
    finally:
        gc.enable()
    return seconds


def rows(field: Sequence[Contestant], seconds: dict[str, list[float]], numel: int) -> dict[str, dict[str, Any]]:
    """The rows of the table by contestant; rates are those of the median, shares of STREAM are of the same rounds."""
    found = {}
    for contestant in field:
        times = seconds[contestant.name]
        name = stream_name(contestant.layout)
        share = None
        if name in seconds:
            rate = contestant.traffic / TRAFFIC[contestant.layout]
            share = median(rate * bound / own for own, bound in zip(times, seconds[name], strict=True))
        found[contestant.name] = {
            "ms_per_1e9": median(times) / numel * 1e12,
            "ms_per_1e9_min": min(times) / numel * 1e12,
            "bytes_per_parameter": contestant.traffic,
            "gb_per_s": contestant.traffic * numel / median(times) / 1e9,
            "share_of_stream": share,
        }
    return found


def ratios(seconds: dict[str, list[float]], isas: Sequence[str]) -> list[dict[str, Any]]:
    """The ratios of the (fastest) peer's time to this package's time in each round; above 1, this package is faster.

    Ratios to missing peers are left out. Goals are for the median, with the default instruction set.
    """
    chain = ["deepspeed chain: scale, step, cast"]
    duels: list[tuple[Layout, list[str], float | None]] = [
        ("fp32", ["torch fused", "deepspeed kernel"], 0.97),
        ("fp32_copy", chain, 1.5),
        ("fp32_copy", ["deepspeed step, cast"], None),
        ("split", chain, None),
        ("fp32_copy_half", chain, None),
        ("split_half", chain, 2.0),
        ("split_byte", chain, 2.0),
        *((layout, [stream_name(layout)], None if layout.endswith(("half", "byte")) else 0.85) for layout in LAYOUTS),
    ]
    found = []
    for layout, peers, goal in duels:
        for target in isas:
            if not all(peer in seconds for peer in peers):
                continue
            best = [min(times) for times in zip(*(seconds[peer] for peer in peers), strict=True)]
            own = seconds[our_name(layout, target)]
            by_round = [peer / ours for peer, ours in zip(best, own, strict=True)]
            found.append(
                {
                    "ours": our_name(layout, target),
                    "peers": peers,
                    "median": median(by_round),
                    "min": min(by_round),
                    "goal": goal if target == ops.isa() else None,
                }
            )
    return found


def table(run: dict[str, Any]) -> str:
    """Rows and ratios as two Markdown tables."""
    lines = [
        "| step | ms / 10^9 parameters | fastest | bytes / parameter | GB/s | % of STREAM |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in run["rows"].items():
        share = "" if row["share_of_stream"] is None else f"{row['share_of_stream']:.0%}"
        lines.append(
            f"| {name} | {row['ms_per_1e9']:.0f} | {row['ms_per_1e9_min']:.0f} | {row['bytes_per_parameter']:g} | "
            f"{row['gb_per_s']:.1f} | {share} |"
        )
    lines += ["", "| peer's time / our time | peer | median | min | goal | reached |", "|---|---|---|---|---|---|"]
    for ratio in run["ratios"]:
        goal = "" if ratio["goal"] is None else ratio["goal"]
        reached = "" if ratio["goal"] is None else "no" if ratio["median"] < ratio["goal"] else "yes"
        peers = "the faster of " * (len(ratio["peers"]) > 1) + " and ".join(ratio["peers"])
        lines.append(f"| {ratio['ours']} | {peers} | {ratio['median']:.3f} | {ratio['min']:.3f} | {goal} | {reached} |")
    return "\n".join(lines)


def plot(result: dict[str, Any], path: Path) -> None:
    """Save a chart of the medians, with marks for the time of STREAM on the same arrays; needs matplotlib."""
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError:
        print("no matplotlib: without a chart")
        return
    runs = {
        threads: {name: row for name, row in run["rows"].items() if not name.startswith("STREAM")}
        for threads, run in result["runs"].items()
    }
    palette = colormaps["tab10"]
    colors = {"torch": palette(7), "deepspeed": palette(1), "ours": palette(0)}
    height = 1.2 + 0.32 * max(len(shown) for shown in runs.values())
    figure = Figure(figsize=(6 + 4.5 * len(runs), height), layout="constrained")
    axes = figure.subplots(1, len(runs), sharey=True, squeeze=False)[0]
    for axis, (threads, shown) in zip(axes, runs.items(), strict=True):
        times = [row["ms_per_1e9"] for row in shown.values()]
        # torch's loops take several times as long as the rest, so their bars are cut at the edge.
        limit = 1.25 * max(time for name, time in zip(shown, times, strict=True) if name not in CUT)
        bars = axis.barh(list(shown), times, color=[colors[name.split()[0]] for name in shown])
        for bar, row in zip(bars, shown.values(), strict=True):
            bottom, thickness, end = bar.get_y(), bar.get_height(), row["ms_per_1e9"]
            style: dict[str, Any] = {"va": "center", "ha": "left"}
            if end > 0.9 * limit:
                style |= {"ha": "right", "color": "white"}
                axis.text(0.99 * limit, bottom + thickness / 2, f"{end:.0f} →", **style)
                continue
            if row["share_of_stream"] is not None:
                # A disturbed STREAM may have taken many times as long. Its mark is kept on the chart, because a
                # label far outside would leave no room for the bars.
                bound = min(end * row["share_of_stream"], 0.9 * limit)
                axis.plot([bound, bound], [bottom, bottom + thickness], color="black", linewidth=2)
                end = max(end, bound)
            axis.text(end + 0.01 * limit, bottom + thickness / 2, f"{row['ms_per_1e9']:.0f}", **style)
        axis.set_xlim(0, limit)
        axis.set_title(f"{threads} thread{'s' * (threads != '1')}")
        axis.set_xlabel("ms per 10⁹ parameters (median)")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    where = f"{result['numel'] / 1e6:g} million parameters, {result['environment']['cpu']}"
    figure.suptitle(f"AdamW step, {where} (black: STREAM moving the same bytes)")
    figure.savefig(path, dpi=150)


def _parameter(arrays: Arrays) -> nn.Parameter:
    param = nn.Parameter(arrays.param)
    param.grad = arrays.grad
    return param


def _state(arrays: Arrays, step: Any) -> dict[str, Any]:
    return {"step": step, "exp_avg": arrays.exp_avg, "exp_avg_sq": arrays.exp_avg_sq}


def _without_factor(step: Callable[[], object], factor: float) -> None:
    step()


def _huge_pages_setting() -> str:
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return path.read_text().strip() if path.exists() else ""


def _huge_page_gib() -> float | None:
    """How many GiB of this process's memory lie in huge pages."""
    path = Path("/proc/self/smaps_rollup")
    lines = path.read_text().splitlines() if path.exists() else []
    found = (int(line.split()[1]) for line in lines if line.startswith("AnonHugePages"))
    return next((round(kib / 2**20, 2) for kib in found), None)


if __name__ == "__main__":
    main()
