"""Facts of `/proc` and `/sys`, read from made-up ones."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from lightning_zero import ops
from lightning_zero.cgroups import cpu_quota, memory_limit
from lightning_zero.cli.machine import read_machine

GIB = 1024**3
V1_NONE = "9223372036854771712"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "quota", "memory"),
    [
        pytest.param({}, None, None, id="nothing"),
        pytest.param(
            {
                "proc/self/cgroup": "0::/job/step\n",
                "sys/fs/cgroup/job/cpu.max": "150000 100000\n",
                "sys/fs/cgroup/job/step/cpu.max": "max 100000\n",
                "sys/fs/cgroup/job/memory.max": f"{4 * GIB}\n",
                "sys/fs/cgroup/job/step/memory.max": f"{2 * GIB}\n",
            },
            1.5,
            2 * GIB,
            id="v2-the-smallest-level",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/../../outside\n",
                "sys/fs/cgroup/cpu.max": "400000 100000\n",
                "sys/fs/cgroup/memory.max": "max\n",
            },
            4.0,
            "unlimited",
            id="v2-in-a-container",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "4:memory:/job\n1:cpu,cpuacct:/job\n0::/\n",
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "50000\n",
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{GIB}\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": V1_NONE,
            },
            0.5,
            GIB,
            id="v1",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "2:memory:/\n1:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": V1_NONE,
            },
            "unlimited",
            "unlimited",
            id="v1-without-limits",
        ),
        pytest.param(
            {"sys/fs/cgroup/cpu.max": "nonsense\n", "sys/fs/cgroup/memory.max": ""}, None, None, id="unreadable"
        ),
    ],
)
def test_the_limits_of_control_groups(files: dict[str, str], quota: object, memory: object, tmp_path: Path) -> None:
    root = write(tmp_path, files)
    assert cpu_quota(root) == quota
    assert memory_limit(root) == memory


def test_memory_nodes_and_pages(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemTotal:        1024 kB\nMemAvailable:     512 kB\nHugePages_Total:       0\n",
        "proc/cpuinfo": "processor : 0\nmodel name\t: Some CPU @ 3 GHz\n",
        "sys/devices/system/node/node0/cpulist": "0-3",
        "sys/devices/system/node/node1/cpulist": "4-7",
        "sys/devices/system/node/online": "0-1",
        "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
    }
    machine = read_machine(write(tmp_path, files))
    assert machine.memory_bytes == 1024**2
    assert machine.memory_available_bytes == 512 * 1024
    assert machine.cpu == "Some CPU @ 3 GHz"
    assert machine.numa_nodes == 2
    assert machine.huge_pages == "never"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has process_vm_readv")
def test_what_keeps_ranks_from_reading_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LIGHTNING_ZERO_CMA", raising=False)
    some = "no: kernel.yama.ptrace_scope=2, so only processes with CAP_SYS_PTRACE may, such as those of root"
    none, root = "no: kernel.yama.ptrace_scope=3, so no process may", tmp_path
    for mode, capabilities, expected in [
        ("0", 0, "yes"),
        ("1", 0, "yes"),
        ("2", 0xFFFF, some),
        ("2", 1 << 19, "yes"),
        ("3", 1 << 19, none),
    ]:
        files = {
            "proc/sys/kernel/yama/ptrace_scope": f"{mode}\n",
            "proc/self/status": f"CapPrm:\t{1 << 19:016x}\nCapEff:\t{capabilities:016x}\n",
        }
        assert read_machine(write(root, files), ops).cross_memory == expected
    assert read_machine(root).cross_memory == "unknown"
    refused = Mock(side_effect=PermissionError(1, "Operation not permitted"))
    monkeypatch.setattr("lightning_zero.ops.processes.read_memory", refused)
    assert read_machine(Path("/"), ops).cross_memory == "no: Operation not permitted"
    for asked, reason in [("off", "LIGHTNING_ZERO_CMA=off"), ("no", "LIGHTNING_ZERO_CMA='no' must be 'off', or unset")]:
        monkeypatch.setenv("LIGHTNING_ZERO_CMA", asked)
        assert read_machine(Path("/"), ops).cross_memory == f"no: {reason}"


def test_a_system_without_proc_and_sys(tmp_path: Path) -> None:
    machine = read_machine(tmp_path)
    assert machine.cores
    assert machine.numa_nodes is machine.huge_pages is machine.cpu_quota is machine.memory_limit_bytes is None
