"""`lightning-zero estimate`: which strategy fits a model onto machines, how fast a step can be, and what to type.

`--json` prints one object. Within a schema version fields are added, never renamed or removed; a name that ends in
`_bytes` counts bytes, one that ends in `_seconds` seconds.

- `schema`: 1
- `model`: `name`, `parameters`, `activation_bytes` (null: unknown), `flops` of a micro-batch (null: unknown), `note`
- `machine`: see `lightning_zero.planning.devices.Machine`
- `choices`: the fastest that fits first, then the others that fit, then the rest. Each has: `hydra`, `python`;
  `fits`, `device_fits`, `host_fits`, `disk_fits`; `device_held_bytes`, `device_peak_bytes`, `host_held_bytes`,
  `host_peak_bytes` and `disk_held_bytes` of a rank (a step reads and writes the last); `pinned_peak_bytes`, the pinned
  part of the host's peak; `sent_bytes`, `copied_to_device_bytes` and `copied_to_host_bytes` of a rank in a step;
  `step_seconds`, a lower bound, with its parts `compute_seconds`, `network_seconds`, `pcie_seconds`, `update_seconds`,
  `disk_seconds` and `sums_seconds` (of micro-batches in host memory); `limit`, the longest of these parts
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from hydra.core.override_parser.types import Quote, QuotedString
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lightning_zero.cli.imagined import Imagined
from lightning_zero.cli.request import SOME_FOLDER, STANDS, Request
from lightning_zero.cli.text import complain, facts_table, print_json, size, wide_console
from lightning_zero.integration.choices import choices
from lightning_zero.integration.precision import ZeroPrecision
from lightning_zero.planning.devices import Machine
from lightning_zero.planning.estimate import Choice, Estimate, estimate, ranked
from lightning_zero.planning.memory import Memory
from lightning_zero.update import CPUAdamW

SCHEMA = 1
_META = torch.device("meta")
_LIMITS = {
    "compute": "computation",
    "network": "network",
    "pcie": "PCIe",
    "update": "update",
    "disk": "disk",
    "sums": "sums",
}


def run(request: Request, *, as_json: bool = False) -> int:
    """Estimates and prints; returns the exit code."""
    try:
        machine, imagined = request.machine(), request.imagine()
        estimates = estimate_all(imagined, machine, request)
    except (ValueError, OSError) as error:
        return complain(error)
    if as_json:
        return print_json(SCHEMA, _as_json(imagined, machine, estimates))
    wide_console().print(render(imagined, machine, estimates))
    return 0


def estimate_all(imagined: Imagined, machine: Machine, request: Request) -> list[Estimate]:
    """Estimates every way to train, the fastest that fits first."""
    micro_batches = request.accumulate
    wide = ZeroPrecision(request.precision).policy.param_dtype not in (torch.bfloat16, torch.float16)
    flops = 0 if imagined.trace is None else micro_batches * imagined.trace.flops
    found = []
    fixed = {"activation_offload": True} if request.activation_offload else {}
    for choice in choices(machine.gpus, machine.nodes, request.precision, request.nvme_path, fixed):
        memory = _memory(imagined, choice, machine, micro_batches)
        found.append(estimate(choice, memory.plan, flops, wide, machine))
    return ranked(found)


def _memory(imagined: Imagined, choice: Choice, machine: Machine, micro_batches: int) -> Memory:
    parameters = [p for p in imagined.module.parameters() if p.requires_grad]
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters)
    if choice.reduced:
        optimizer = CPUAdamW(parameters, master_layout="split", state_dtype=torch.bfloat16)
    return Memory(
        module=imagined.module,
        trains=True,
        optimizers=[optimizer],
        micro_batches=micro_batches,
        setting=choice.setting,
        dtypes={},
        units=None,
        native="auto",
        device=torch.device("cpu") if machine.gpu.shares_host else _META,
        world_size=machine.world_size,
        rank=0,
        candidates=[],
        hint="",
        trace=imagined.trace,
    )


def _as_json(imagined: Imagined, machine: Machine, estimates: Sequence[Estimate]) -> dict[str, Any]:
    return {
        "model": model_as_json(imagined),
        "machine": asdict(machine),
        "choices": [choice_as_json(each) for each in estimates],
    }


def model_as_json(imagined: Imagined) -> dict[str, Any]:
    """Makes the entry of a model."""
    trace = imagined.trace
    return {
        "name": imagined.name,
        "parameters": sum(p.numel() for p in imagined.module.parameters()),
        "activation_bytes": None if trace is None else trace.peak,
        "flops": None if trace is None else trace.flops,
        "note": imagined.note,
    }


def choice_as_json(each: Estimate) -> dict[str, Any]:
    """Makes the entry of one way to train."""
    plan, times = each.plan, each.times
    return {
        "hydra": typed(each.choice.overrides),
        "python": each.choice.python,
        "fits": each.fits,
        "device_fits": each.device_fits,
        "host_fits": each.host_fits,
        "disk_fits": each.disk_fits,
        "device_held_bytes": plan.held.device,
        "device_peak_bytes": plan.peak.device,
        "host_held_bytes": plan.held.host,
        "host_peak_bytes": plan.peak.host,
        "pinned_peak_bytes": plan.peak.pinned,
        "disk_held_bytes": plan.held.disk,
        "sent_bytes": sum(plan.sent.values()),
        "copied_to_device_bytes": plan.copied.get("h2d", 0),
        "copied_to_host_bytes": plan.copied.get("d2h", 0),
        "step_seconds": times.bound,
        **{f"{name}_seconds": seconds for name, seconds in asdict(times).items()},
        "limit": times.limit,
    }


def render(imagined: Imagined, machine: Machine, estimates: Sequence[Estimate]) -> RenderableType:
    """Renders the table for people, and under it what to type."""
    gpu, trace = machine.gpu, imagined.trace
    activations = "unknown" if trace is None else size(trace.peak)
    facts = {
        "model": f"{imagined.name}, {sum(p.numel() for p in imagined.module.parameters()):,} parameters",
        "activations": f"{activations}; {imagined.note}",
        "machine": f"{machine.nodes} x {machine.gpus} x {gpu.name}, {size(machine.host)} of host memory each",
        "rates": (
            f"{gpu.matmul_16 / 1e12:g} TFLOPS in 16 bits, {gpu.matmul_32 / 1e12:g} in fp32, PCIe {gpu.pcie / 1e9:g}, "
            f"GPU to GPU {gpu.link / 1e9:g}, host memory {machine.dram / 1e9:g} GB/s; {gpu.source}"
        ),
    }
    disk = bool(machine.storage)
    if disk:
        facts["disk"] = f"{size(machine.storage)} each, {machine.disk / 1e9:g} GB/s read or written"
    table = Table(title="GiB of a rank, and the least time of a step")
    table.add_column("fits")
    table.add_column("override", overflow="fold")
    columns = ("device held", "peak", "host held", "peak", *(["disk"] if disk else []), "sent", "to device", "to host")
    for name in (*columns, "step, s", "bound by"):
        table.add_column(name, justify="right")
    for each in estimates:
        plan, times = each.plan, each.times
        figures = [plan.held.device, plan.peak.device, plan.held.host, plan.peak.host]
        figures += [plan.held.disk] if disk else []
        figures += [sum(plan.sent.values()), plan.copied.get("h2d", 0), plan.copied.get("d2h", 0)]
        places = {"device": each.device_fits, "host": each.host_fits, "disk": each.disk_fits}
        lacks = " and ".join(name for name, ok in places.items() if not ok)
        table.add_row(
            Text(f"no: {lacks}" if lacks else "yes", style="red" if lacks else "green"),
            short(each.choice),
            *(f"{nbytes / 2**30:,.2f}" for nbytes in figures),
            f"{times.bound:.3g}" if trace is not None else "",
            _LIMITS[times.limit] if trace is not None else "",
        )
    return Group(facts_table(facts), table, _recommendation(estimates))


def typed(overrides: Mapping[str, Any]) -> str:
    """Writes overrides as they are typed in a shell."""
    return " ".join(shlex.quote(f"{key}={_in_hydra(value)}") for key, value in overrides.items())


def _in_hydra(value: Any) -> str:
    """Writes a value in the grammar of Hydra's overrides, where a text with other characters needs quotes."""
    if not isinstance(value, str) or re.fullmatch(r"[\w./-]+", value, re.ASCII):
        return str(value)
    return QuotedString(value, Quote.double).with_quotes()


def short(choice: Choice, *more: str) -> str:
    """Writes the overrides that differ from row to row, also without those of the keys ``more``."""
    left_out = ("precision", "trainer.devices", "trainer.num_nodes", *more)
    return typed({key: value for key, value in choice.overrides.items() if key not in left_out})


def _recommendation(estimates: Sequence[Estimate]) -> RenderableType:
    best = estimates[0]
    if not best.fits:
        return Text(
            "Nothing fits. Recomputation (--checkpointing, or the code of a --model), activations in host memory "
            "(--activation-offload), a smaller --batch, more GPUs, more host memory, or a disk (--disk) take or have "
            "what is missing."
        )
    stands = best.choice.overrides.get("strategy.nvme_path") == SOME_FOLDER
    return Group(
        *([Text(STANDS)] if stands else []),
        Text("The fastest that fits, with Hydra and in Python:"),
        Text(f"  python train.py {typed(best.choice.overrides)}", style="bold"),
        Text(f"  {best.choice.python}", style="bold"),
    )
