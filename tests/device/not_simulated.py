"""Tests of `tests/engine` and `tests/strategy` that do not run on the simulated device, and why."""

from __future__ import annotations

# By the beginning of node ids.
REASONS: dict[str, str] = {
    "tests/engine/test_plan.py::test_a_device_that_is_not_there": "compares the plan of a CPU with that of a device",
}


def reason(nodeid: str) -> str | None:
    """Why a test is skipped there; `None`: it runs."""
    found = [why for beginning, why in REASONS.items() if nodeid.startswith(beginning)]
    return found[0] if found else None
