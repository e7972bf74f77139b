"""NUMA nodes: finds the cores near a device, from `sys` below a folder `root`, normally `/`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_zero.cgroups import read_text

_CORES = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")


@dataclass(frozen=True, slots=True)
class Node:
    """A NUMA node.

    Attributes:
        number: the system's number of the node.
        cores: numbers of its cores, in order.
    """

    number: int
    cores: tuple[int, ...]


def pci_address_of(properties: Any) -> str | None:
    """Returns the PCI address from torch's properties of a GPU; None if they do not contain it."""
    parts = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    domain, bus, slot = (0 if part is None else int(part) for part in parts)
    return None if None in parts else f"{domain:04x}:{bus:02x}:{slot:02x}.0"


def node_of(pci_address: str, root: Path = Path("/")) -> Node | None:
    """Finds the node that a device is attached to; None if there is only one node, or the node is not known.

    Args:
        pci_address: address of the device as in `/sys/bus/pci/devices`: "0000:3b:00.0".
        root: see the module's docstring.
    """
    number = (read_text(root / "sys/bus/pci/devices" / pci_address.lower() / "numa_node") or "").strip()
    if not number.isdecimal():  # -1: the firmware does not provide it
        return None
    cores = (read_text(root / "sys/devices/system/node" / f"node{number}" / "cpulist") or "").strip()
    return Node(int(number), tuple(parse_cores(cores))) if _CORES.fullmatch(cores) else None


def share_of(nodes: list[Node | None], number: int, allowed: Iterable[int]) -> list[int]:
    """Selects the cores near its device for one of several processes; empty if there is nothing to select.

    Processes whose devices are attached to the same node divide its cores. If a process may run only on a part of the
    node's cores, for example because of its launcher, it takes that whole part.

    Args:
        nodes: for each process, the node of its device.
        number: number of the process.
        allowed: cores that the process may run on.
    """
    node, all_allowed = nodes[number], set(allowed)
    if node is None or all_allowed <= set(node.cores):
        return []
    cores = [core for core in node.cores if core in all_allowed]
    if len(cores) < len(node.cores):
        return cores
    beside = [other for other, its in enumerate(nodes) if its == node]
    share = max(1, len(cores) // len(beside))
    first = beside.index(number) * share % len(cores)
    return cores[first : first + share]


def parse_cores(text: str) -> list[int]:
    """Parses numbers and ranges of cores: `"0-2,5"` means [0, 1, 2, 5].

    Raises:
        ValueError: the text has another form, or a range is descending.
    """
    if not _CORES.fullmatch(text):
        raise ValueError(f"{text!r} must be numbers and ranges such as '0-3,8'")
    cores: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if int(last or first) < int(first):
            raise ValueError(f"{text!r} has a range that runs downwards: {part!r}")
        cores.extend(range(int(first), int(last or first) + 1))
    return cores


def write_cores(cores: Iterable[int]) -> str:
    """Formats cores, in order, for :func:`parse_cores`: [0, 1, 2, 5] becomes `"0-2,5"`."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
