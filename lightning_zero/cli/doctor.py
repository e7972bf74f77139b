"""`lightning-zero doctor`: checks whether the package works on this machine, and advises improvements.

`--json` prints one object. Within a schema version fields are added, never renamed or removed. null means that a fact
is unknown on this machine, and "unlimited" that there is no limit. A name that ends in `_bytes` counts bytes.

- `schema`: 1
- `ok`: whether no finding has severity "problem"; only then the exit code is 0
- `findings`: list of `severity` ("problem" or "warning"), `section`, `message`, `remedy`
- `kernels`: `extension` (the file), `compiled`, `supported`, `chosen`, `forced` (LIGHTNING_ZERO_ISA), `threads`,
  `threads_beside` (the training); null where the kernels cannot be loaded
- `checks`: list of `kernel`, `case`, `isa`, `against` ("torch", "isa", "threads"), `passed`, `detail`
- `machine`: see `lightning_zero.cli.machine.MachineReport`
- `environment`: the environment variables that matter, by name
- `disk`: see `lightning_zero.cli.disk.Disk`; null unless `--nvme` asks for it, and where it cannot be measured
- `rates`: see `lightning_zero.cli.rates.Measured`; null unless `--measure` asks for it, and where they cannot be kept
- `packages`, `torch`, `accelerators`: see `lightning_zero.cli.software`; the latter two null without torch
"""

from __future__ import annotations

import importlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lightning_zero.cli.disk import Disk, describe_disk, judge_disk, measure_disk
from lightning_zero.cli.machine import MachineReport, read_machine
from lightning_zero.cli.rates import Measured, describe_rates, judge_rates, measure_all
from lightning_zero.cli.software import (
    DISTRIBUTION,
    Accelerators,
    Package,
    Torch,
    describe_extension,
    extension_is_cut_short,
    read_accelerators,
    read_packages,
    read_torch,
)
from lightning_zero.cli.text import facts_table, number, size

if TYPE_CHECKING:
    from lightning_zero.cli.kernel_checks import Check

SCHEMA = 1

_ISA = "LIGHTNING_ZERO_ISA"
_SETTINGS = (_ISA, "LIGHTNING_ZERO_NUM_THREADS", "LIGHTNING_ZERO_CORES")  # read when the kernels are imported
_OTHERS = "CLEAR_ERRORS CMA IO_URING NVME_PATH"
_KNOWN = (*_SETTINGS, *(f"LIGHTNING_ZERO_{name}" for name in _OTHERS.split()))
_PREFIXES = ("LIGHTNING_ZERO_", "NCCL_", "GLOO_", "TORCH_NCCL_", "KMP_")
_NAMES = frozenset(
    "ATEN_CPU_CAPABILITY CUDA_DEVICE_ORDER CUDA_LAUNCH_BLOCKING CUDA_VISIBLE_DEVICES GOMP_CPU_AFFINITY LD_LIBRARY_PATH"
    " LD_PRELOAD MKL_NUM_THREADS NVIDIA_TF32_OVERRIDE OMP_NUM_THREADS OMP_PROC_BIND PYTHONPATH PYTORCH_ALLOC_CONF"
    " PYTORCH_CUDA_ALLOC_CONF".split()
)
_SMALL_MEMLOCK = 1 << 30
_SMALL_SHM = 1 << 30  # https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html

Severity = Literal["problem", "warning"]
_MARKS = {"ok": "✓", "warning": "!", "problem": "✗"}
_ASCII_MARKS = {"ok": "+", "warning": "!", "problem": "x"}
_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that does not work ("problem") or could be better ("warning"), and what to do about it."""

    severity: Severity
    section: str
    message: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Kernels:
    """The compiled extension.

    Attributes:
        extension: its file.
        compiled: instruction sets in it, slowest first.
        supported: instruction sets that this machine can run.
        chosen: the instruction set in use; None if the environment asks for one that is not available.
        forced: the value of LIGHTNING_ZERO_ISA; None if it is unset.
        threads: most threads of a kernel.
        threads_beside: most threads of a kernel that runs beside the training.
    """

    extension: str
    compiled: tuple[str, ...]
    supported: tuple[str, ...]
    chosen: str | None
    forced: str | None
    threads: int
    threads_beside: int


@dataclass(slots=True)
class Report:
    """All facts and findings; the attributes are the fields of `--json`."""

    kernels: Kernels | None
    checks: list[Check]
    machine: MachineReport
    environment: dict[str, str]
    packages: list[Package]
    torch: Torch | None
    accelerators: Accelerators | None
    disk: Disk | None = None
    rates: Measured | None = None
    findings: list[Finding] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not any(finding.severity == "problem" for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "ok": self.ok} | asdict(self)


def run(*, nvme: Path | None = None, params: float | None = None, measure: bool = False, as_json: bool = False) -> int:
    """Prints the report; returns the exit code. `nvme` and `params`: see `lightning_zero.cli.disk.measure_disk`."""
    report = examine()
    if nvme is not None and report.kernels is not None:
        add_disk(report, nvme, params)
    if measure and report.kernels is not None:
        add_rates(report)
    if as_json:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        console = Console(highlight=False)
        console.print(render(report, _ASCII_MARKS if console.options.ascii_only else _MARKS))
    return 0 if report.ok else 1


def examine(root: Path = Path("/")) -> Report:
    """Collects all facts and runs all checks; facts about the system are read under `root`."""
    findings: list[Finding] = []
    torch = kernels = accelerators = ops = None
    checks: list[Check] = []
    try:
        torch = read_torch()
    except (ImportError, OSError) as error:
        remedy = "Install torch anew; see https://pytorch.org/get-started"
        findings.append(Finding("problem", "software", f"torch cannot be imported: {error}", remedy))
    else:
        accelerators = read_accelerators(root)
        ops, usable = _import_kernels(findings)
        if ops is not None:
            kernels = _read_kernels(ops, usable)
            checks = _run_checks(ops, kernels)
    report = Report(
        kernels=kernels,
        checks=checks,
        machine=read_machine(root, ops),
        environment={
            name: value for name, value in sorted(os.environ.items()) if name in _NAMES or name.startswith(_PREFIXES)
        },
        packages=read_packages(),
        torch=torch,
        accelerators=accelerators,
        findings=findings,
    )
    for judge in (_judge_checks, _judge_threads, _judge_memory, _judge_packages, _judge_accelerators):
        findings += judge(report)
    return report


def add_disk(report: Report, path: Path, params: float | None = None) -> None:
    """Measures a disk, and adds what is found to a report."""
    try:
        report.disk = measure_disk(path, params)
    except OSError as error:
        remedy = "Choose a folder on a local disk that can be written to."
        report.findings.append(Finding("problem", "disk", f"{path} cannot be measured: {error}", remedy))
    else:
        report.findings += [Finding("warning", "disk", *found) for found in judge_disk(report.disk)]


def add_rates(report: Report) -> None:
    """Measures rates, keeps them, and adds them to a report."""
    try:
        report.rates = measure_all(None if report.disk is None else report.disk.mixed_bytes_per_second)
    except (OSError, ValueError) as error:
        remedy = "Set XDG_CACHE_HOME to a folder that can be written to."
        report.findings.append(Finding("problem", "rates", f"the rates cannot be kept: {error}", remedy))
    else:
        report.findings += [Finding("warning", "rates", *found) for found in judge_rates(report.rates)]


def _import_kernels(findings: list[Finding]) -> tuple[ModuleType | None, bool]:
    """Imports `lightning_zero.ops`, and tells whether this environment allows its import.

    If an environment variable prevents it, the module is imported without the variable, so that kernels can be checked.
    """
    if extension_is_cut_short():
        findings.append(_broken_extension("cannot be loaded"))
        return None, False
    try:
        return importlib.import_module("lightning_zero.ops"), True
    except ImportError as error:
        cause = error.__cause__ or error
        # One that names the package only says that nothing was found in it, and guesses why.
        found = not isinstance(cause, ImportError) or cause.name != "lightning_zero.ops"
        findings.append(_broken_extension("cannot be loaded", *([str(cause)] if found else [])))
        return None, False
    except AttributeError as error:
        findings.append(_broken_extension("is not of this version of the package", str(error)))
        return None, False
    except (OSError, ValueError) as error:
        hidden = {name: os.environ.pop(name) for name in _SETTINGS if name in os.environ}
        message = f"the kernels cannot be imported: {error}"
        remedy = "Correct or unset the environment variable that this is about; the checks here ran without it."
        findings.append(Finding("problem", "kernels", message, remedy))
        try:
            return importlib.import_module("lightning_zero.ops"), False
        except (OSError, ValueError):  # not about a variable
            return None, False
        finally:
            os.environ.update(hidden)


def _broken_extension(state: str, *reasons: str) -> Finding:
    reason = "; ".join([*reasons, *describe_extension()])
    remedy = f"Install the package again with this Python: pip install --force-reinstall --no-deps {DISTRIBUTION}"
    remedy += ", or `pip install .` in its sources. Do not let a source folder on sys.path hide the installed one."
    return Finding("problem", "kernels", f"the compiled extension {state}: {reason}", remedy)


def _read_kernels(ops: ModuleType, usable: bool) -> Kernels:
    forced = os.environ.get(_ISA) or None
    refused = not usable and forced is not None and forced not in ops.supported_isas()
    return Kernels(
        extension=str(ops._C.__file__),
        compiled=ops.compiled_isas(),
        supported=ops.supported_isas(),
        chosen=None if refused else ops.isa() if usable or forced is None else forced,
        forced=forced,
        threads=ops.get_num_threads(),
        threads_beside=ops.threads_beside(),
    )


def _run_checks(ops: ModuleType, kernels: Kernels) -> list[Check]:
    from lightning_zero.cli.kernel_checks import check_kernels

    fastest_first = reversed(kernels.supported)
    return check_kernels(ops, sorted(fastest_first, key=lambda isa: isa != kernels.chosen))


def _judge_checks(report: Report) -> Iterator[Finding]:
    failed = [check for check in report.checks if not check.passed]
    if failed:
        kernels = ", ".join(dict.fromkeys(f"{check.kernel} on {check.isa}" for check in failed))
        yield Finding(
            "problem",
            "kernels",
            f"{len(failed)} of {len(report.checks)} checks failed: {kernels}",
            f"Do not train with these kernels. If {_ISA} can name an instruction set without failures, use that; "
            "please report this output.",
        )


def _judge_threads(report: Report) -> Iterator[Finding]:
    for name in report.environment:
        if name.startswith("LIGHTNING_ZERO_") and name not in _KNOWN:
            yield Finding(
                "warning", "machine", f"the variable {name} is unknown", f"Known ones are {', '.join(_KNOWN)}."
            )
    machine, threads = report.machine, report.kernels.threads if report.kernels else 1
    allowed = [
        (limit, name)
        for limit, name in ((machine.cores_by_affinity, "affinity"), (machine.cpu_quota, "control group"))
        if isinstance(limit, int | float) and threads > max(1, limit)
    ]
    if allowed:
        limit, name = min(allowed)
        yield Finding(
            "warning",
            "machine",
            f"the kernels use {threads} threads, the {name} of this process allows {limit:g} cores",
            f"Set LIGHTNING_ZERO_NUM_THREADS={max(1, int(limit))}.",
        )


def _judge_memory(report: Report) -> Iterator[Finding]:
    machine = report.machine
    if machine.huge_pages == "never":
        yield Finding(
            "warning",
            "machine",
            "transparent huge pages are off, which slows updates of large state in host memory and transfers of a disk",
            "As root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )
    limit, cuda = machine.memlock_bytes, report.accelerators is not None and report.accelerators.available
    if cuda and isinstance(limit, int) and limit < _SMALL_MEMLOCK:
        yield Finding(
            "warning",
            "machine",
            f"only {size(limit)} of memory may be locked, which can be too little for pinned buffers of the GPU",
            "Raise it: `ulimit -l unlimited`, in a container --ulimit memlock=-1.",
        )
    shared = machine.shared_memory_bytes
    if cuda and shared is not None and shared < _SMALL_SHM:
        yield Finding(
            "warning",
            "machine",
            f"/dev/shm has {size(shared)}, through which NCCL and the workers of a DataLoader pass data",
            "In a container, raise it: --shm-size=1g, or --ipc=host.",
        )


def _judge_packages(report: Report) -> Iterator[Finding]:
    for package in report.packages:
        if package.accepted:
            continue
        severity: Severity = "warning" if package.optional else "problem"
        if package.compromised:
            yield Finding(
                "problem",
                "software",
                f"{package.name} {package.version} is a compromised release",
                f"Uninstall it, install {package.name}{package.required}, and replace the secrets this machine held.",
            )
        elif package.name == DISTRIBUTION:
            yield Finding(
                "problem",
                "software",
                f"{DISTRIBUTION} is imported but not installed, so that versions cannot be checked",
                "Install it: `pip install .` in its sources.",
            )
        else:
            state = f"{package.version} is outside" if package.version else "is missing, needed:"
            message = f"{package.name} {state} {package.required}"
            yield Finding(severity, "software", message, f"pip install '{package.name}{package.required}'")


def _judge_accelerators(report: Report) -> Iterator[Finding]:
    accelerators = report.accelerators
    if accelerators is None:
        return
    if accelerators.driver and not accelerators.available:
        built = report.torch.cuda if report.torch else None
        yield Finding(
            "warning",
            "accelerators",
            f"there is an NVIDIA driver ({accelerators.driver}), but torch cannot use a GPU "
            f"(built {f'for CUDA {built}' if built else 'without CUDA'})",
            "Check CUDA_VISIBLE_DEVICES, and install a build of torch for a CUDA version that the driver supports.",
        )
    if accelerators.available and accelerators.nccl is None:
        yield Finding(
            "warning", "accelerators", "torch has no NCCL: GPUs cannot form a world", "Install another build."
        )
    if not accelerators.gloo:
        yield Finding(
            "warning", "accelerators", "torch has no gloo: ranks cannot run on CPUs", "Install another build."
        )
    for message in accelerators.messages:
        yield Finding("warning", "accelerators", f"torch says: {message}", "See what it advises.")


def render(report: Report, marks: Mapping[str, str]) -> RenderableType:
    """Renders the report for people; marks tell the states apart without colour."""
    parts: list[RenderableType] = []
    sections: dict[str, list[RenderableType]] = {
        "kernels": _render_kernels(report, marks),
        "machine": _render_machine(report),
        "software": _render_software(report, marks),
        "accelerators": _render_accelerators(report),
    }
    if report.disk is not None or any(finding.section == "disk" for finding in report.findings):
        sections["disk"] = [] if report.disk is None else [facts_table(describe_disk(report.disk))]
    if report.rates is not None or any(finding.section == "rates" for finding in report.findings):
        sections["rates"] = [] if report.rates is None else [facts_table(describe_rates(report.rates))]
    for name, content in sections.items():
        found = [finding for finding in report.findings if finding.section == name]
        # "problem" sorts before "warning".
        state = min((finding.severity for finding in found), default="ok" if content else "warning")
        parts.append(_marked(marks, state, f"[bold]{name.capitalize()}[/bold]"))
        parts += [Padding(part, (0, 0, 0, 2)) for part in content or ["not examined"]]
        for finding in found:
            text = f"{escape(finding.message)}\n[dim]{escape(finding.remedy)}[/dim]"
            parts.append(Padding(_marked(marks, finding.severity, text), (0, 0, 0, 2)))
        parts.append("")
    count = Counter(finding.severity for finding in report.findings)
    summary = ", ".join(number(count[severity], severity) for severity in ("problem", "warning") if count[severity])
    state = "problem" if count["problem"] else "warning" if count["warning"] else "ok"
    parts.append(_marked(marks, state, summary or "everything works"))
    return Group(*parts)


def _marked(marks: Mapping[str, str], state: str, markup: str) -> RenderableType:
    """Renders a mark, and beside it text of any number of lines."""
    row = Table.grid(padding=(0, 1))
    row.add_column(no_wrap=True)
    row.add_column(overflow="fold")
    row.add_row(Text(marks[state], style=_STYLES[state]), Text.from_markup(markup))
    return row


def _render_kernels(report: Report, marks: Mapping[str, str]) -> list[RenderableType]:
    kernels = report.kernels
    if kernels is None:
        return []
    forced = "" if kernels.forced is None else f" ({_ISA}={kernels.forced})"
    facts = {
        "extension": kernels.extension,
        "compiled": ", ".join(kernels.compiled),
        "detected": ", ".join(kernels.supported),
        "chosen": (kernels.chosen or "none") + forced,
        "threads": f"{kernels.threads}, beside the training {kernels.threads_beside}",
    }
    isas = list(dict.fromkeys(check.isa for check in report.checks))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("passed checks")
    for isa in isas:
        table.add_column(isa)
    for kernel in dict.fromkeys(check.kernel for check in report.checks):
        cells = []
        for isa in isas:
            passed = [check.passed for check in report.checks if (check.kernel, check.isa) == (kernel, isa)]
            state = "ok" if all(passed) else "problem"
            cells.append(Text(f"{marks[state]} {sum(passed)}/{len(passed)}", style=_STYLES[state]))
        table.add_row(kernel, *cells)
    failures = [
        _marked(marks, "problem", escape(f"{check.kernel}, {check.case}, {check.isa}: {check.detail}"))
        for check in report.checks
        if not check.passed
    ]
    return [facts_table(facts), "", table, *failures]


def _render_machine(report: Report) -> list[RenderableType]:
    machine = report.machine
    quota = machine.cpu_quota
    cores = [f"{machine.cores} in the machine" if machine.cores else "unknown"]
    if machine.cores_by_affinity is not None:
        cores.append(f"{machine.cores_by_affinity} by affinity")
    if quota is not None:
        cores.append("no quota" if quota == "unlimited" else f"{quota:g} by quota of the control group")
    memory = [size(machine.memory_bytes)]
    if machine.memory_available_bytes is not None:
        memory.append(f"{size(machine.memory_available_bytes)} available")
    if machine.memory_limit_bytes is not None:
        limit = machine.memory_limit_bytes
        memory.append("no limit" if limit == "unlimited" else f"{size(limit)} by limit of the control group")
    facts = {
        "system": f"{machine.system}, {machine.architecture}" + (f", {machine.cpu}" if machine.cpu else ""),
        "cores": ", ".join(cores),
        "memory": ", ".join(memory),
        "locked memory": size(machine.memlock_bytes),
        "/dev/shm": size(machine.shared_memory_bytes),
        "NUMA nodes": "unknown" if machine.numa_nodes is None else str(machine.numa_nodes),
        "huge pages": machine.huge_pages or "unknown",
    }
    return [facts_table(facts | {"read other ranks": machine.cross_memory} | report.environment)]


def _render_software(report: Report, marks: Mapping[str, str]) -> list[RenderableType]:
    table = Table.grid(padding=(0, 2))
    for package in report.packages:
        if package.optional and package.version is None:
            continue
        state = "ok" if package.accepted else "warning" if package.optional else "problem"
        mark = Text(marks[state], style=_STYLES[state])
        table.add_row(mark, package.name, package.version or "missing", Text(package.required, style="dim"))
    if report.torch is None:
        return [table]
    built = f"CUDA {report.torch.cuda}" if report.torch.cuda else "no CUDA"
    torch = f"torch is {report.torch.version}: {built}, {report.torch.cpu_capability} on this CPU, "
    return [table, Text(torch + f"{number(report.torch.threads, 'thread')}", style="dim")]


def _render_accelerators(report: Report) -> list[RenderableType]:
    accelerators = report.accelerators
    if accelerators is None:
        return []
    facts = {
        f"GPU {index}": f"{device.name}, {size(device.memory_bytes)}, capability {device.capability}{device.near}"
        for index, device in enumerate(accelerators.devices)
    } or {"GPU": "none that torch can use"}
    facts["driver"] = accelerators.driver or "none"
    facts["NCCL"] = accelerators.nccl or "not in this torch"
    facts["gloo"] = "available" if accelerators.gloo else "not in this torch"
    return [facts_table(facts)]
