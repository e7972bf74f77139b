"""`lightning-zero doctor`: exit codes, findings, and both forms of the report."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import lightning_zero
from lightning_zero import ops
from lightning_zero.cli import app, doctor, main, software
from lightning_zero.cli.disk import Disk, describe_disk, judge_disk, measure_disk
from lightning_zero.cli.doctor import examine
from lightning_zero.cli.software import Accelerators, Device

FIELDS = [
    "schema",
    "ok",
    "kernels",
    "checks",
    "machine",
    "environment",
    "packages",
    "torch",
    "accelerators",
    "disk",
    "rates",
    "findings",
]
H200 = Accelerators(
    available=True,
    driver="570.86.15",
    devices=(Device("NVIDIA H200", 150 * 1024**3, "9.0"),),
    nccl="2.28.9",
    gloo=True,
    messages=(),
)


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"}, catch_exceptions=False)
    return result.exit_code, result.stdout


def problems(report: doctor.Report) -> list[str]:
    return [finding.message for finding in report.findings if finding.severity == "problem"]


def warnings_of(report: doctor.Report) -> list[str]:
    return [finding.message for finding in report.findings if finding.severity == "warning"]


@pytest.fixture
def no_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the kernels out, where a test is about something else."""
    monkeypatch.setattr("lightning_zero.cli.doctor._run_checks", lambda *_: [])


@pytest.fixture
def fresh_import(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Let the doctor import the kernels anew; afterwards everybody has the old modules again."""
    monkeypatch.setattr(lightning_zero, "ops", ops)
    for name in list(sys.modules):
        if name == "lightning_zero.ops" or (name.startswith("lightning_zero.ops.") and name != ops._C.__name__):
            monkeypatch.delitem(sys.modules, name)
    return monkeypatch


@pytest.fixture(scope="module")
def process() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the doctor in a process of its own; fixtures that use it keep its start out of a test's time."""

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-m", "lightning_zero.cli", *arguments]
        env = os.environ | {"COLUMNS": "200", "PYTHONIOENCODING": "utf-8"} | environment
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, env=env)

    return run


@pytest.fixture(scope="module")
def as_json(process: Callable[..., Any]) -> subprocess.CompletedProcess[str]:
    return process("doctor", "--json", LIGHTNING_ZERO_ISA=ops.supported_isas()[0])  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def unknown_isa(process: Callable[..., Any]) -> subprocess.CompletedProcess[str]:
    return process("doctor", LIGHTNING_ZERO_ISA="sse9", PYTHONIOENCODING="ascii")  # type: ignore[no-any-return]


def test_a_process_prints_one_json_object_and_the_isa_it_was_asked_for(
    as_json: subprocess.CompletedProcess[str],
) -> None:
    assert as_json.returncode == 0, as_json.stdout + as_json.stderr
    report = json.loads(as_json.stdout)
    assert list(report) == FIELDS
    assert report["schema"] == 1
    assert report["ok"] is True
    slowest = ops.supported_isas()[0]
    assert report["kernels"]["chosen"] == report["kernels"]["forced"] == slowest
    assert report["kernels"]["supported"] == list(ops.supported_isas())
    assert report["environment"]["LIGHTNING_ZERO_ISA"] == slowest
    assert {check["isa"] for check in report["checks"]} == set(ops.supported_isas())
    assert report["checks"][0].keys() == {"kernel", "case", "isa", "against", "passed", "detail"}
    assert report["checks"][0]["isa"] == slowest


@pytest.mark.slow
def test_an_unknown_isa_is_explained_and_the_rest_is_reported(unknown_isa: subprocess.CompletedProcess[str]) -> None:
    assert unknown_isa.returncode == 1
    output = " ".join(unknown_isa.stdout.split())
    assert "x the kernels cannot be imported: instruction set 'sse9' is not available" in output
    assert "Set LIGHTNING_ZERO_ISA to one of these, or unset it to use the fastest. Correct" in output
    assert "chosen none (LIGHTNING_ZERO_ISA=sse9)" in output
    assert "1 problem" in output
    for reported in ("passed checks", "split, join", "lightning-zero", "gloo"):
        assert reported in output
    assert "Traceback" not in unknown_isa.stdout + unknown_isa.stderr


def test_help_imports_no_torch() -> None:
    """What the command itself imports; `lightning`, which registering the strategies imports, is left out."""
    code = """
import sys, types
for name in ("lightning", "lightning.pytorch", "lightning.pytorch.strategies"):
    sys.modules[name] = types.ModuleType(name)
sys.modules[name].StrategyRegistry = types.SimpleNamespace(register=lambda *_, **__: None)
from typer.testing import CliRunner
from lightning_zero.cli import app
for arguments in (["--help"], ["doctor", "--help"], ["inspect", "--help"], ["export", "--help"]):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0 and arguments[0].replace("--help", "doctor") in result.stdout, result.output
print("torch" in sys.modules)
"""
    result = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False, timeout=240
    )
    assert result.stdout == "False\n", result.stderr


def test_the_script_is_installed() -> None:
    (script,) = metadata.entry_points(group="console_scripts", name="lightning-zero")
    assert script.load() is main


@pytest.mark.usefixtures("no_checks")
def test_the_module_runs_the_same_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-zero", "doctor", "--json"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True


def test_without_a_verb_there_is_help() -> None:
    result = CliRunner().invoke(app, [])
    assert "doctor" in result.output


def test_everything_works_here() -> None:
    code, output = invoke("doctor")
    assert code == 0
    for section in ("✓ Kernels", "Machine", "✓ Software", "Accelerators", "passed checks"):
        assert section in output
    assert "✗" not in output
    assert str(ops._C.__file__) in output


def test_a_kernel_that_is_slightly_wrong_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ops.adamw_

    def wrong(*, lr: float, **arguments: Any) -> None:
        right(lr=lr * 1.001, **arguments)

    monkeypatch.setattr(ops, "adamw_", wrong)
    monkeypatch.setattr(ops, "add_", lambda total, values, **_: total.add_(values, alpha=1.001))
    monkeypatch.setattr(ops, "sum_", lambda total, parts, **_: total.copy_(parts[0]))
    code, output = invoke("doctor")
    assert code == 1
    assert "✗ Kernels" in output
    assert "✗ adamw, fp32, " in output
    assert "checks failed" in output
    assert "✓ Software" in output

    code, output = invoke("doctor", "--json")
    report = json.loads(output)
    assert code == 1
    assert report["ok"] is False
    failed = {check["kernel"] for check in report["checks"] if not check["passed"]}
    assert failed == {"adam", "adamw", "adamw amsgrad", "add", "sum"}


@pytest.mark.usefixtures("no_checks")
@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("LIGHTNING_ZERO_ISA", "sse9", "instruction set 'sse9' is not available"),
        ("LIGHTNING_ZERO_NUM_THREADS", "many", "LIGHTNING_ZERO_NUM_THREADS='many' must be a whole number"),
        ("LIGHTNING_ZERO_CORES", "first", "LIGHTNING_ZERO_CORES='first' must be numbers"),
    ],
)
def test_a_variable_that_forbids_the_import(
    variable: str, value: str, message: str, fresh_import: pytest.MonkeyPatch
) -> None:
    fresh_import.setenv(variable, value)
    report = examine()
    (problem,) = problems(report)
    assert message in problem
    assert report.kernels is not None
    assert report.kernels.supported == ops.supported_isas()
    assert (report.kernels.chosen is None) == (variable == "LIGHTNING_ZERO_ISA")
    assert os.environ[variable] == value


def test_a_missing_extension_is_explained(fresh_import: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fresh_import.setitem(sys.modules, ops._C.__name__, None)
    fresh_import.setattr(software.importlib.util, "find_spec", lambda _: _Spec(tmp_path))
    report = examine()
    (problem,) = problems(report)
    assert problem.startswith("the compiled extension cannot be loaded: ")
    assert problem.endswith(f"no compiled file _C* in {tmp_path}")
    assert report.kernels is None
    assert report.checks == []
    assert report.torch is not None
    code, output = invoke("doctor")
    assert code == 1
    assert "✗ Kernels" in output
    assert "pip install" in output


def test_an_extension_of_another_version_is_explained(fresh_import: pytest.MonkeyPatch) -> None:
    fresh_import.delattr(ops._C, "Ties")
    (problem,) = problems(examine())
    assert "not of this version of the package" in problem
    assert "'Ties'" in problem


class _Spec:
    def __init__(self, folder: Path) -> None:
        self.submodule_search_locations = [str(folder)]


@pytest.mark.skipif(sys.platform != "linux", reason="reads ELF files")
def test_what_a_broken_extension_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(software.importlib.util, "find_spec", lambda _: _Spec(tmp_path))
    name = Path(str(ops._C.__file__)).name
    original = Path(str(ops._C.__file__)).read_bytes()
    (tmp_path / "_C.cpython-27-x86_64-linux-gnu.so").write_bytes(original)
    (tmp_path / name).write_bytes(original)
    foreign, whole = software.describe_extension()
    assert "another Python" in foreign
    assert "a shared library of" in whole
    (tmp_path / name).write_bytes(original[:18] + b"\xf3\x00" + original[20:])
    assert "made for another CPU" in software.describe_extension()[1]
    assert not software.extension_is_cut_short()
    (tmp_path / name).write_bytes(original[:5000])
    assert "cut short" in software.describe_extension()[1]
    assert software.extension_is_cut_short()
    (problem,) = problems(examine())  # without loading it, which would end the process
    assert "cut short" in problem
    (tmp_path / name).write_bytes(b"version https://git-lfs.github.com/spec/v1")
    assert "not a shared library" in software.describe_extension()[1]


def test_torch_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError("libtorch_cpu.so: cannot open shared object file")

    monkeypatch.setattr(doctor, "read_torch", fail)
    report = examine()
    assert problems(report) == ["torch cannot be imported: libtorch_cpu.so: cannot open shared object file"]
    assert report.torch is report.kernels is report.accelerators is None
    code, output = invoke("doctor")
    assert code == 1
    assert "! Kernels" in output
    assert "✗ Software" in output


@pytest.mark.usefixtures("no_checks")
def test_versions_outside_the_range_and_compromised_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"lightning": "2.6.3", "torch": "2.9.1", "numpy": "odd", "deepspeed": "0.10.0"}
    true_version = metadata.version
    monkeypatch.setattr(software.metadata, "version", lambda name: versions.get(name) or true_version(name))
    report = examine()
    assert problems(report) == [
        "torch 2.9.1 is outside >=2.10",
        "lightning 2.6.3 is a compromised release",
        "numpy odd is outside >=1.26",
    ]
    assert warnings_of(report).count("deepspeed 0.10.0 is outside >=0.17") == 1
    code, output = invoke("doctor")
    assert code == 1
    assert "✗  lightning " in output
    assert "! deepspeed 0.10.0" in output


@pytest.mark.usefixtures("no_checks")
def test_missing_packages_and_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(software.metadata, "version", nothing)
    assert "torch is missing, needed: >=2.10" in problems(examine())
    monkeypatch.setattr(software.metadata, "metadata", nothing)
    assert "lightning-zero is imported but not installed, so that versions cannot be checked" in problems(examine())


@pytest.mark.usefixtures("no_checks")
def test_warnings_alone_leave_the_exit_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, text in {
        "sys/fs/cgroup/cpu.max": "150000 100000",
        "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]",
        "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 1\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setenv("LIGHTNING_ZERO_NUM_THREAD", "4")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(ops, "get_num_threads", lambda: 64)
    report = examine(tmp_path)
    assert report.ok
    found = "\n".join(warnings_of(report))
    for expected in ("LIGHTNING_ZERO_NUM_THREAD is unknown", "64 threads", "huge pages are off", "driver (570.86.15)"):
        assert expected in found
    monkeypatch.setattr(doctor, "examine", lambda: report)
    code, output = invoke("doctor")
    assert code == 0
    assert "! Machine" in output
    assert "LIGHTNING_ZERO_NUM_THREADS=1." in output


@pytest.mark.usefixtures("no_checks")
def test_gpus_are_listed_and_locked_memory_matters_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    resource = importlib.import_module("resource")
    monkeypatch.setattr(doctor, "read_accelerators", lambda _: H200)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 * 1024**2, 8 * 1024**2))
    code, output = invoke("doctor")
    assert code == 0
    assert "NVIDIA H200, 150 GiB, capability 9.0" in output
    assert "only 8 MiB of memory may be locked" in output
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert "may be locked" not in invoke("doctor")[1]


@pytest.mark.usefixtures("no_checks")
def test_a_small_dev_shm_matters_to_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "read_accelerators", lambda _: H200)
    for nbytes, warned in ((64 << 20, True), (16 << 30, False)):
        monkeypatch.setattr("lightning_zero.cli.machine.shared_memory", lambda _, nbytes=nbytes: nbytes)
        assert any("/dev/shm has 64 MiB" in warning for warning in warnings_of(examine())) is warned


@pytest.mark.usefixtures("no_checks")
def test_torch_without_ways_between_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    lonely = Accelerators(
        available=True, driver=None, devices=H200.devices, nccl=None, gloo=False, messages=("the driver is old",)
    )
    monkeypatch.setattr(doctor, "read_accelerators", lambda _: lonely)
    found = "\n".join(warnings_of(examine()))
    for expected in ("no NCCL", "no gloo", "torch says: the driver is old"):
        assert expected in found


def test_gpus_as_torch_reports_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        name, total_memory, major, minor = "NVIDIA H200", 150 * 1024**3, 9, 0

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: Properties)
    found = software.read_accelerators()
    assert found.devices == H200.devices * 2

    def refuse(_: int) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr("torch.cuda.get_device_properties", refuse)
    assert software.read_accelerators().messages == ("CUDA error: out of memory",)


@pytest.mark.usefixtures("no_checks")
def test_gpus_name_the_cores_that_are_near(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Properties:
        name, total_memory, major, minor = "NVIDIA H200", 150 * 1024**3, 9, 0
        pci_domain_id, pci_bus_id, pci_device_id = 0, 0x3B, 0

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: Properties)
    node, cores = (tmp_path / name for name in ("sys/bus/pci/devices/0000:3b:00.0", "sys/devices/system/node/node1"))
    for folder, name, text in ((node, "numa_node", "1\n"), (cores, "cpulist", "4-7,12\n")):
        folder.mkdir(parents=True)
        (folder / name).write_text(text)
    monkeypatch.setattr(doctor, "read_accelerators", lambda _: software.read_accelerators(tmp_path))
    (device,) = json.loads(invoke("doctor", "--json")[1])["accelerators"]["devices"]
    assert [device[key] for key in ("pci_address", "numa_node", "numa_cores")] == ["0000:3b:00.0", 1, "4-7,12"]
    assert "capability 9.0, NUMA node 1: kernels keep to cores 4-7,12" in invoke("doctor")[1]
    (node / "numa_node").write_text("-1\n")  # the firmware does not say
    assert "NUMA node 1" not in invoke("doctor")[1]


@pytest.mark.usefixtures("no_checks")
def test_a_disk_is_measured_where_one_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "measure_disk", functools.partial(measure_disk, seconds=0.01))
    code, output = invoke("doctor", "--nvme", str(tmp_path), "--params", "1e6", "--json")
    disk = json.loads(output)["disk"]
    assert code == 0
    assert [*disk] == [field.name for field in dataclasses.fields(Disk)]
    assert [step["resting_bytes"] for step in disk["steps"]] == [12_000_000, 16_000_000, 14_000_000, 8_000_000]
    for step in disk["steps"]:
        # At stage 3 forward and backward both read the parameters, and the update does not.
        read_alone = 2e6 / disk["read_bytes_per_second"] if "parameters" in step["optimizer"] else 0
        both = 2 * step["resting_bytes"] / disk["mixed_bytes_per_second"]
        assert step["seconds"] == pytest.approx(both + read_alone)
    assert not [*tmp_path.iterdir()]
    code, output = invoke("doctor", "--nvme", str(tmp_path), "--params", "1e14")
    assert code == 0
    assert re.search(r"mixed +[\d.]+ GB/s", output)
    assert "takes 1091 TiB" in output
    code, output = invoke("doctor", "--nvme", str(tmp_path / "missing"), "--json")
    assert code == 1
    assert "is not a folder that exists" in json.loads(output)["findings"][-1]["message"]
    assert invoke("doctor", "--params", "1e6")[0] == 2


def test_what_moves_the_blocks_of_a_disk_is_said_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTNING_ZERO_IO_URING", "off")
    facts = describe_disk(measure_disk(tmp_path, seconds=0.001))
    assert facts["backend"] == "threads: there is no io_uring (LIGHTNING_ZERO_IO_URING=off)"
    monkeypatch.delenv("LIGHTNING_ZERO_IO_URING")
    disk = measure_disk(tmp_path, seconds=0.001)
    assert (disk.backend == "io_uring") <= (not ops.io_uring_refusal())
    assert describe_disk(disk)["backend"] == f"{disk.backend}: {disk.backend_reason}"
    monkeypatch.setattr(ops.disk._C, "io_uring_refusal", lambda: "io_uring_setup: Operation not permitted")
    disk = measure_disk(tmp_path, seconds=0.001)
    assert disk.backend_reason == "there is no io_uring (io_uring_setup: Operation not permitted)"


def test_what_makes_a_disk_a_bad_place_is_advised(tmp_path: Path) -> None:
    disk = measure_disk(tmp_path, seconds=0.001)
    for change, words in (
        ({"in_memory": True, "file_system": "tmpfs"}, "host memory"),
        ({"on_network": True, "file_system": "nfs4"}, "over a network"),
        ({"direct": False, "reason": "the file system refuses O_DIRECT"}, "page cache"),
    ):
        (message, _), *others = judge_disk(dataclasses.replace(disk, **change))
        assert words in message
        assert not others
