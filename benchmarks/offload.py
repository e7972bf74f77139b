"""Compares offloading by this package, DeepSpeed, FSDP2 and torchao for models that do not fit on one GPU.

    pip install torchao
    DS_BUILD_OPS=0 ../peers/bin/pip install -e ".[peers]"
    python -m benchmarks.offload --deepspeed-python ../peers/bin/python --out ../offload.json
    python -m benchmarks.offload --models 1.3b 6.7b --only zero3_offload fsdp2 --out ../offload.json --resume
    python -m benchmarks.offload --device sim --models tiny --tokens 128 --only zero2_offload zero3_offload --rounds 1 \
        --out ../trial.json

torchao runs in the environment of this command; `../peers` is another virtual environment, for DeepSpeed.

A GPT-like language model of 1.3B, 2.7B, 6.7B or 10B parameters, with random weights, trains in bf16 by AdamW: 16
sequences of 1024 tokens per step, in four micro-batches, with every block recomputed in backward, without clipping. The
memory of torch's allocator on the GPU is limited (`--device-memory-gib`); the memory of the CUDA context and of
libraries is not included in the limit. Nothing is downloaded.

Every contestant trains the same model from the same weights, which bf16 represents exactly, on the same micro-batches.
In every round the contestants run one at a time, each in a process of its own, in random order.

- zero2_offload, zero3_offload: this package, by `lightning.Trainer` with logging, checkpoints, progress bar and
  summary off. `_split`: with split masters. `_part`: with split masters, and the least `offload_fraction` of a quarter,
  a half and three quarters whose plan, including activations, fits 90% of the device's memory; skipped if none does.
  `_in_backward`: each bucket is updated as soon as its gradient is complete (`update_in_backward=True`). `_sums`: the
  gradients of micro-batches are summed on the device, in fp32 (`accumulate_on_device=True`). `_in_backward_sums`: both.
- deepspeed2_offload, deepspeed3_offload: DeepSpeed's engine with its defaults but without clipping, and its CPU Adam,
  which it compiles and which needs `nvcc` or `DS_SKIP_CUDA_CHECK=1`; at stage 3 parameters are offloaded, too, and the
  model is made in `deepspeed.zero.Init`. deepspeed3_super: stage 3 with SuperOffload as in its examples, if the
  installed version has it; parameters stay on the device.
- fsdp2: `fully_shard` of every block with `CPUOffloadPolicy`, computing and reducing in bf16, fp32 shards, fused AdamW.
  fsdp2_sums: the same, but the gradients of micro-batches are summed on the device, in bf16, and copied once per step.
- torchao_fp32: torchao's `CPUOffloadOptimizer` over fused AdamW, with fp32 parameters on the device under autocast.
  torchao: the same over bf16 parameters, without masters and with bf16 state; it computes less than the others.

Time is measured from the end of one optimizer step to the end of the step `--steps` later, including forward, backward,
update and the loop around them; at both ends the device has completed all requested work. An update that overlaps with
the next forward is running at both ends. `forward_backward_seconds` is the minimum over two steps of the time for
forward and backward of all micro-batches, measured in the same process before the training, with layers that all have
the weights of one layer, without update, copies and kept gradients. `exposed_seconds` is the rest of a step's time:
update, copies and everything else that did not overlap. Both include the time of Python.

Memory: the peak of resident memory since the start of the process (`peak_gib`, with imports and the initial weights)
and during the measured steps (`peak_of_steps_gib`); pinned memory (`pinned_peak_gib`: of torch's allocator, as rounded
by it, and what this package registers); device memory of tensors, and reserved by the allocator; and the decrease of
the machine's available memory (`host_gib`), which includes helper processes and other users of the machine.

Ratios to each peer are computed from seconds of the same round; their median and minimum over the rounds are saved. The
losses of all contestants must agree in every step and must fall, otherwise the run stops. If a contestant runs out of
device or host memory, or refuses to start because its plan does not fit, the message is its result, and it is not
started again. Any other failure ends the run. Results are saved after each contestant; `--resume` continues with saved
results that were measured with the same settings, and `--overwrite` replaces them. Without either, the file `--out`
must not exist; its default holds the results in `docs/strategies.md`.

`--device sim` tries the program without a GPU, on the device of `tests/device`, which the first run compiles (it needs
a C++ compiler); `--device cpu` does so for fsdp2 and DeepSpeed. Neither says anything about speed.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from benchmarks import contest
from benchmarks.contest import (
    Contestant,
    RankError,
    Result,
    Round,
    begin,
    check_torch,
    contend,
    ratios,
    run_ranks,
    seconds_of,
)
from benchmarks.examples import ROOT
from benchmarks.offload_rank import GIB, Job, Model
from lightning_zero.integration.names import STRATEGIES
from lightning_zero.integration.options import StrategyOptions
from lightning_zero.integration.precision import ZeroPrecision
from lightning_zero.integration.remedies import setting_of
from lightning_zero.planning.memory import Memory
from lightning_zero.planning.tracing import Trace, trace

RANK = ROOT / "benchmarks/offload_rank.py"
TINY = {"layers": 6, "width": 64, "heads": 4, "vocabulary": 1024}
MODELS: dict[str, dict[str, int]] = {
    "tiny": TINY,
    "1.3b": {"layers": 24, "width": 2048, "heads": 16, "vocabulary": 50304},
    "2.7b": {"layers": 32, "width": 2560, "heads": 32, "vocabulary": 50304},
    "6.7b": {"layers": 32, "width": 4096, "heads": 32, "vocabulary": 50304},
    "10b": {"layers": 48, "width": 4096, "heads": 32, "vocabulary": 50304},
}
LARGE = [model for model in MODELS if model != "tiny"]
FRACTIONS = (0.25, 0.5, 0.75)
ROOM = 0.9  # fraction of the device's memory that a plan may use

SPLIT = {"master_layout": "split"}
IN_BACKWARD = {"update_in_backward": True, "skip_nonfinite": False}
SUMS = {"accumulate_on_device": True}
OURS: dict[str, dict[str, Any]] = {
    name + suffix: {**STRATEGIES[name], **changed}
    for name in ("zero2_offload", "zero3_offload")
    for suffix, changed in (
        *(("", {}), ("_split", SPLIT), ("_part", SPLIT), ("_in_backward", IN_BACKWARD)),
        *(("_sums", SUMS), ("_in_backward_sums", IN_BACKWARD | SUMS)),
    )
}
ON_HOST = {"device": "cpu", "pin_memory": True}
DEEPSPEED: dict[str, dict[str, Any]] = {
    "deepspeed2_offload": {"stage": 2, "offload_optimizer": ON_HOST},
    "deepspeed3_offload": {"stage": 3, "offload_optimizer": ON_HOST, "offload_param": ON_HOST},
    "deepspeed3_super": {
        "stage": 3,
        "overlap_comm": False,
        "reduce_bucket_size": 400_000_000,
        "sub_group_size": 400_000_000,
        "offload_optimizer": ON_HOST | {"super_offload": True, "cpuadam_cores_perc": 0.9},
    },
}
TORCHAO = {"torchao_fp32": {"parameters": "fp32"}, "torchao": {"parameters": "bf16"}}
FSDP2 = {"fsdp2": {"sums": False}, "fsdp2_sums": {"sums": True}}
OTHERS: dict[str, dict[str, Any]] = {**FSDP2, **TORCHAO}
PEERS = [*DEEPSPEED, *OTHERS]
# By device, the reasons why peers do not run on it; this package runs on all devices.
NOT_ON = {
    "sim": dict.fromkeys(PEERS, "it does not know this device"),
    "cpu": dict.fromkeys([*TORCHAO, "deepspeed3_super"], "it needs CUDA"),
}
COLUMNS = {
    "median, s": "median",
    "min, s": "min",
    "tokens/s": "tokens_per_second",
    "exposed, s": "exposed_seconds",
    "resident, GiB": "peak_gib",
    "pinned": "pinned_peak_gib",
    "device": "device_peak_gib",
    **{f"to {peer}": f"to {peer}" for peer in PEERS},
    "outcome": "outcome",
}
NUMBERS = (
    *("tokens_per_second", "forward_backward_seconds", "exposed_seconds", "peak_gib", "peak_of_steps_gib", "host_gib"),
    *("pinned_peak_gib", "device_peak_gib", "device_reserved_gib"),
)
SETTING = ("batch", "tokens", "warmup", "steps", "learning_rate", "tolerance", "device", "device_memory_gib", "seed")


@dataclass(frozen=True)
class Cell:
    """One training setting.

    Attributes:
        model: key of `MODELS`.
        micro_batches: number of micro-batches per optimizer step.
        batch: number of sequences per micro-batch.
    """

    model: str
    micro_batches: int
    batch: int

    def __str__(self) -> str:
        return f"{self.model} x{self.micro_batches}"


# --------------------------------------------------------------------------------------------------------- contestants


def contestants(options: argparse.Namespace) -> tuple[list[Contestant], dict[str, str]]:
    """The requested contestants that can run, and the reasons why others cannot."""
    found, left_out = [], {}
    for name in [*OURS, *PEERS]:
        python = options.deepspeed_python if name in DEEPSPEED else sys.executable
        if options.only and name not in options.only:
            continue
        if reason := refusal(name, python, options.device):
            print(f"{name} is left out: {reason}", flush=True)
            left_out[name] = reason
        else:
            found.append(Contestant(name, system_of(name), python))
    if not found:
        raise SystemExit(f"none of {', '.join(left_out)} can run on {options.device}: name others with --only")
    return found, left_out


def system_of(name: str) -> str:
    """The key of `RUNS` in the process of the contestant ``name``."""
    kinds: dict[str, Mapping[str, Any]] = {"ours": OURS, "deepspeed": DEEPSPEED, "fsdp2": FSDP2, "torchao": TORCHAO}
    return next(system for system, names in kinds.items() if name in names)


def refusal(name: str, python: str, device: str) -> str:
    """The reason why a contestant cannot run; empty if none is known."""
    if reason := NOT_ON.get(device, {}).get(name):
        return reason
    package = {"deepspeed": "deepspeed", "torchao": "torchao"}.get(system_of(name))
    if package and not contest.version_in(python, package):
        return f"{python} does not have {package}"
    if name == "deepspeed3_super":
        module = "deepspeed.runtime.superoffload"
        if contest.ask(python, f"__import__('importlib.util').util.find_spec({module!r}) is not None") != "True":
            return f"the DeepSpeed of {python} has no SuperOffload"
    return ""


def options_of(name: str, cell: Cell, options: argparse.Namespace) -> dict[str, Any] | None:
    """The options of a system; ``None`` if it does not take part in this cell."""
    found = {**OURS, **DEEPSPEED, **OTHERS}[name]
    if not name.endswith("_part"):
        return found
    fraction = planned_fraction(name, cell, options.tokens, options.device_memory_gib)
    return None if fraction is None else found | {"offload_fraction": fraction}


@cache
def planned_fraction(name: str, cell: Cell, tokens: int, gib: float) -> float | None:
    """The smallest fraction whose plan fits; ``None`` if no plan fits the device."""
    module, activations = imagined(cell, tokens)
    for fraction in FRACTIONS:
        chosen = StrategyOptions(**OURS[name], offload_fraction=fraction)
        memory = Memory(
            module=module,
            trains=True,
            optimizers=[torch.optim.AdamW(module.parameters())],
            micro_batches=cell.micro_batches,
            setting=setting_of(chosen, 1, ZeroPrecision("bf16-true").policy),
            dtypes={},
            units=None,
            native="auto",
            device=torch.device("meta"),
            world_size=1,
            rank=0,
            candidates=[],
            hint="",
            trace=activations,
        )
        if memory.plan.peak.device <= ROOM * gib * GIB:
            return fraction
    return None


@cache
def imagined(cell: Cell, tokens: int) -> tuple[torch.nn.Module, Trace]:
    """The model on the meta device, and the trace of a micro-batch's activations."""
    sizes = MODELS[cell.model]
    job = Job("", {}, "", 0.0, **sizes, batch=cell.batch, tokens=tokens, micro_batches=1, warmup=1, steps=1,
              learning_rate=0.0, folder="")  # fmt: skip
    with torch.device("meta"):
        module = Model(job).to(torch.bfloat16)

    def loss(twin: torch.nn.Module) -> torch.Tensor:
        found: torch.Tensor = twin(torch.zeros(cell.batch, tokens + 1, dtype=torch.long))
        return found

    return module, trace(module, loss, ZeroPrecision("bf16-true").policy)


# ----------------------------------------------------------------------------------------------------------- measuring


def measure(contestant: Contestant, cell: Cell, options: argparse.Namespace) -> Result:
    """Start the process of one contestant and wait for it."""
    given = options_of(contestant.name, cell, options)
    job = {"system": contestant.system, "options": given, **MODELS[cell.model]}
    job |= {"batch": cell.batch, "micro_batches": cell.micro_batches}
    job |= {key: getattr(options, key) for key in Job._fields if hasattr(options, key) and key not in job}
    # DeepSpeed's helper reads its accelerator and its port from environment variables.
    variables = {"LOCAL_SIZE": 1, "OMP_NUM_THREADS": threads(options.device), "TORCH_DEVICE_BACKEND_AUTOLOAD": 0}
    variables |= {"DS_ACCELERATOR": {"cuda": "cuda"}.get(options.device, "cpu")}
    if options.device == "sim":
        variables |= {"TORCH_FR_BUFFER_SIZE": 0}  # as the ranks of the tests have it
    host = HostMemory()
    with tempfile.TemporaryDirectory(prefix="offload-") as folder:
        start = time.monotonic()
        try:
            (found,) = run_ranks(contestant, RANK, job | {"folder": folder}, 1, variables, options.limit, host.look)
        except RankError as error:
            if error.code != -signal.SIGKILL:
                raise
            found = {"out_of_memory": "ended by SIGKILL, as systems do when the memory of the host is full"}
        found["seconds_with_start"] = time.monotonic() - start
    if fraction := (given or {}).get("offload_fraction"):
        found["offload_fraction"] = fraction
    return found | {"host_gib": host.taken / GIB}


class HostMemory:
    """The largest decrease of the machine's available memory since the start, in bytes."""

    def __init__(self) -> None:
        self._before = self._available()
        self.taken = 0

    def look(self) -> None:
        self.taken = max(self.taken, self._before - self._available())

    @staticmethod
    def _available() -> int:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def threads(device: str) -> int:
    """The number of threads of torch and OpenMP in the process."""
    return 1 if device == "sim" else len(os.sched_getaffinity(0))


class Known:
    """Measures contestants, except those that ran out of memory in an earlier round."""

    def __init__(self, result: dict[str, Any]) -> None:
        self._result = result

    def measure(self, contestant: Contestant, cell: Cell, options: argparse.Namespace) -> Result:
        for one in self._result["cells"][str(cell)]["rounds"]:
            if "out_of_memory" in one.get(contestant.name, {}):
                known: Result = one[contestant.name]
                return known
        found = measure(contestant, cell, options)
        if "out_of_memory" in found:
            print(f"{contestant.name} runs out of memory in {cell}: {found['out_of_memory']}", flush=True)
        return found


def check(found: Round, cell: Cell, tolerance: float) -> None:
    """Check that all contestants have trained, and have trained the same.

    Raises:
        RuntimeError: a contestant's losses differ from those of the others, or do not fall.
    """
    trained = {name: result["losses"] for name, result in found.items() if "losses" in result}
    for name, losses in trained.items():
        reference, expected = next(iter(trained.items()))
        for step, (loss, other) in enumerate(zip(losses, expected, strict=True), 1):
            if not abs(loss / other - 1) <= tolerance:
                raise RuntimeError(
                    f"{name} has loss {loss:.6g} in step {step} of {cell}, {reference} {other:.6g}; expected the same "
                    f"within {tolerance:.0%}: they have not trained the same"
                )
        if not losses[-1] < losses[0]:
            raise RuntimeError(
                f"{name} begins with loss {losses[0]:.6g} and ends with {losses[-1]:.6g} in {cell}: it has not "
                "trained; expected a loss that falls. More --steps, or another --learning-rate, may show one"
            )


def summary(rounds: Sequence[Round]) -> dict[str, dict[str, Any]]:
    """By contestant: seconds, ratios to every peer and medians of the rest, or the message about missing memory."""
    found: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(name for one in rounds for name in one):
        mine = [one[name] for one in rounds if "seconds" in one.get(name, {})]
        row = found[name] = {}
        if messages := [one[name]["out_of_memory"] for one in rounds if "out_of_memory" in one.get(name, {})]:
            row["out_of_memory"] = messages[0]
        if mine:
            row |= seconds_of(mine, NUMBERS)
            row["ratios"] = {peer: ratio for peer in PEERS if peer != name and (ratio := ratios(rounds, name, peer))}
    return found


def rows(found: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The rows of a table for a summary: ratios as median and minimum, messages by their first line."""
    shown = {}
    for name, row in found.items():
        columns: dict[str, Any] = {
            f"to {peer}": f"{ratio['median']:.3f} ({ratio['min']:.3f})" for peer, ratio in row.get("ratios", {}).items()
        }
        if "out_of_memory" in row:
            columns["outcome"] = f"out of memory: {row['out_of_memory'].splitlines()[0][:100]}"
        shown[name] = {**row, **columns}
    return shown


# ------------------------------------------------------------------------------------------------------- the whole run


def check_device(options: argparse.Namespace) -> dict[str, Any]:
    """Describe the device for the results.

    Raises:
        SystemExit: there is no such device, or its memory is smaller than the limit.
    """
    if options.device != "cuda":
        return {}
    if not torch.cuda.is_available():
        raise SystemExit(
            f"torch {torch.__version__} sees no CUDA device; expected one for --device cuda: run this on a machine "
            "with a GPU and a build of torch for it, or try the program with --device sim"
        )
    memory = torch.cuda.get_device_properties(0).total_memory / GIB
    if options.device_memory_gib > memory:
        raise SystemExit(
            f"--device-memory-gib {options.device_memory_gib:g} is more than the {memory:.1f} GiB of "
            f"{torch.cuda.get_device_name()}; expected at most that: give a smaller limit"
        )
    return {"cuda": torch.version.cuda, "gpu_memory_gib": round(memory, 1)}


def environment_of(options: argparse.Namespace, device: Mapping[str, Any]) -> dict[str, Any]:
    """The hardware, versions and command."""
    found = contest.environment() | dict(device) | {"threads": threads(options.device)}
    for package, python in (("torchao", sys.executable), ("deepspeed", options.deepspeed_python)):
        if version := contest.version_in(python, package):
            found[package] = version
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    contest.add_arguments(parser, ROOT / "benchmarks/results/offload.json", rounds=5)
    parser.add_argument("--models", nargs="+", default=LARGE, choices=list(MODELS))
    parser.add_argument("--only", nargs="+", default=[], choices=[*OURS, *PEERS], metavar="NAME")
    parser.add_argument("--batch", type=int, default=16, help="sequences of a step")
    parser.add_argument("--tokens", type=int, default=1024, help="of a sequence")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[4], help="that a step has")
    parser.add_argument("--warmup", type=int, default=3, help="optimizer steps before the measured ones, at least 1")
    parser.add_argument("--steps", type=int, default=5, help="measured optimizer steps")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--tolerance", type=float, default=0.02, help="relative difference that losses may have")
    parser.add_argument("--device", choices=["cuda", "sim", "cpu"], default="cuda")
    parser.add_argument("--device-memory-gib", type=float, default=24.0, help="limit of torch's memory on the device")
    parser.add_argument("--limit", type=float, default=3600, help="time limit of a contestant in a round, in seconds")
    options = parser.parse_args()
    if options.warmup < 1 or options.steps < 1:
        parser.error(f"--warmup {options.warmup} --steps {options.steps}; expected at least 1 of each")
    if uneven := [count for count in options.micro_batches if count < 1 or options.batch % count]:
        parser.error(
            f"--micro-batches {uneven[0]} does not divide the {options.batch} sequences of a step (--batch); expected "
            "a number that does"
        )
    options.deepspeed_python = contest.interpreter(options.deepspeed_python)
    return options


def main() -> None:
    options = parse()
    device = check_device(options)
    field, left_out = contestants(options)
    check_torch(field)
    setting = {key: getattr(options, key) for key in SETTING}
    result = begin(options, setting, environment_of(options, device))
    result["left_out"] = result.get("left_out", {}) | left_out  # contestants that join later appear in the rounds
    cells = [Cell(model, count, options.batch // count) for model in options.models for count in options.micro_batches]

    def field_of(cell: Cell) -> list[Contestant]:
        return [each for each in field if options_of(each.name, cell, options) is not None]

    def check_all(found: Round, cell: Cell) -> None:
        check(found, cell, options.tolerance)

    contend(result, cells, field_of, options, Known(result).measure, check_all, summary)
    for cell in cells:
        print(f"\n{cell}\n\n{contest.table(rows(result['cells'][str(cell)]['summary']), COLUMNS)}")


if __name__ == "__main__":
    main()
