"""Cores near a device, from made-up `/sys`, and what a rank takes of them."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_zero import ops
from lightning_zero.integration import engines
from lightning_zero.numa import Node, node_of, parse_cores, pci_address_of, share_of, write_cores
from lightning_zero.storage import accelerators

FAR, NEAR = Node(0, (0, 1, 2, 3)), Node(1, (4, 5, 6, 7))


@given(st.sets(st.integers(0, 300), min_size=1))
def test_cores_are_read_as_they_are_written(cores: set[int]) -> None:
    assert parse_cores(write_cores(cores)) == sorted(cores)


def write(root: Path, **files: str) -> None:
    names = {"address": "sys/bus/pci/devices/0000:3b:00.0/numa_node", "cores": "sys/devices/system/node/node1/cpulist"}
    for name, text in files.items():
        path = root / names[name]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_the_node_of_a_device(tmp_path: Path) -> None:
    assert node_of("0000:3B:00.0", tmp_path) is None  # no such system
    write(tmp_path, address="1\n")
    assert node_of("0000:3B:00.0", tmp_path) is None
    write(tmp_path, cores="4-5,7\n")
    assert node_of("0000:3B:00.0", tmp_path) == Node(1, (4, 5, 7))
    write(tmp_path, address="-1\n")
    assert node_of("0000:3B:00.0", tmp_path) is None
    assert pci_address_of(mock.Mock(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)) == "0000:3b:00.0"
    assert pci_address_of(object()) is None


@pytest.mark.parametrize(
    ("nodes", "number", "allowed", "expected"),
    [
        pytest.param([NEAR], 0, range(8), [4, 5, 6, 7], id="alone"),
        pytest.param([NEAR, FAR, NEAR], 2, range(8), [6, 7], id="with another"),
        pytest.param([NEAR, FAR, NEAR], 1, range(8), [0, 1, 2, 3], id="on the other node"),
        pytest.param([NEAR] * 6, 5, range(8), [5], id="with more than there are cores"),
        pytest.param([NEAR, NEAR], 1, [3, 4, 5], [4, 5], id="of what a launcher has given"),
        pytest.param([NEAR], 0, [4, 5], [], id="which is near"),
        pytest.param([NEAR], 0, [0, 1], [], id="none of which is near"),
        pytest.param([None, NEAR], 0, range(8), [], id="unknown"),
    ],
)
def test_ranks_share_the_cores_near_their_devices(
    nodes: list[Node | None], number: int, allowed: list[int], expected: list[int]
) -> None:
    assert share_of(nodes, number, allowed) == expected


def test_a_rank_keeps_its_kernels_near_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Attached(accelerators.Accelerator):
        def pci_address(self, device: torch.device) -> str | None:
            return "0000:3b:00.0" if device.index == 1 else None

    monkeypatch.setitem(accelerators._TYPES, "xpu", Attached("xpu"))
    write(tmp_path, address="1", cores="1")
    devices = [torch.device("xpu", index) for index in range(2)]
    with (
        mock.patch.object(ops, "keep_near") as kept,
        mock.patch("os.sched_getaffinity", return_value={0, 1}),
    ):
        for number in range(2):
            engines.keep_near(devices, number, tmp_path)
        engines.keep_near([torch.device("cpu")], 0, tmp_path)
    assert [[*call.args[0]] for call in kept.call_args_list] == [[], [1], []]
