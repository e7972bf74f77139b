"""The page of promises and the README's table of what works: every row names tests, and they exist.

The table of memory holds what the plan gives.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
import torch
from helpers.pages import ROOT

from lightning_zero.integration.names import AUTO, STRATEGIES
from lightning_zero.planning import plan
from lightning_zero.sharding import BucketPlacement, Mesh, MixedPrecisionPolicy, ShardingPolicy
from lightning_zero.storage import DeviceStore, HostStore

TESTS = ROOT / "tests"
GIB = 2**30


@functools.cache
def functions_of(path: Path) -> set[str]:
    return set(re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE)) if path.is_file() else set()


def amiss(row: str) -> list[str]:
    """What is wrong with a row: no test, a cell that is none, or a test that is not there."""
    promise, _, cell = row.strip("| ").rpartition(" | ")
    named = [part.strip() for part in cell.split(",")]
    if not promise or not 1 <= len(named) <= 2:
        return [f"{row}: expected a promise and one or two tests"]
    missing = []
    for name in named:
        found = re.fullmatch(r"`([\w/]+\.py)::(test_\w+)`", name)
        if not found or found[2] not in functions_of(TESTS / found[1]):
            missing.append(f"{name} is no test, for: {promise}")
    return missing


def test_every_promise_names_tests_that_exist() -> None:
    lines = (ROOT / "docs" / "promises.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith("|") and line not in ("| promise | test |", "|---|---|")]
    assert len(rows) >= 80
    assert [wrong for row in rows for wrong in amiss(row)] == []
    exists = "`docs/test_promises.py::test_every_promise_names_tests_that_exist`"
    for row in ("| It holds. | |", "| It holds. |", "| It holds. | a test |", f"| It holds. | {exists[:-2]}` |"):
        assert amiss(row), row
    assert amiss(f"| It holds. | {exists} |") == []


def test_every_row_of_what_works_names_tests_that_exist() -> None:
    """Every strategy is in one of them."""
    table = (ROOT / "README.md").read_text().partition("| works | test |\n|---|---|\n")[2].partition("\n\n")[0]
    rows = table.splitlines()
    assert len(rows) >= 15
    assert [wrong for row in rows for wrong in amiss(row)] == []
    named = re.findall(r"`(zero\w+)`", table)
    assert sorted(named) == sorted([*STRATEGIES, AUTO])


@pytest.mark.slow
def test_the_table_of_memory_is_what_the_plan_gives() -> None:
    gpu = torch.device("meta")
    with gpu:
        model = torch.nn.Transformer(4096, 32, 16, 16, 16384, batch_first=True)
    expected = {}
    for name, options in STRATEGIES.items():
        if "nvme" in options.values():
            continue  # as those in host memory, with masters and state on the disk
        optimizer_store, param_store = (
            HostStore() if options.get(f"offload_{what}") == "cpu" else DeviceStore(gpu)
            for what in ("optimizer", "params")
        )
        placement = BucketPlacement(
            Mesh.imagined(1, 8) if options["stage"] == 0 else Mesh.imagined(8),
            ShardingPolicy.from_stage(options["stage"]),
            MixedPrecisionPolicy(torch.bfloat16),
            gpu,
            optimizer_store,
            param_store,
        )
        made = plan(model, placement, [torch.optim.AdamW(model.parameters())], micro_batches=4)
        sizes = (made.held.device, made.held.host, made.peak.device, sum(made.sent.values()))
        expected[name] = [round(size / GIB, 1) for size in sizes]
    text = (ROOT / "docs" / "strategies.md").read_text().partition("| held on the device |")[2].partition("\n\n")[0]
    rows = (row.strip("| ").split(" | ") for row in text.splitlines()[2:])
    assert {name.strip("`"): [float(cell) for cell in cells] for name, *cells in rows} == expected
