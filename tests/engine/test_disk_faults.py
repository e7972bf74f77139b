"""Gradients on a disk that fails: each transfer of a step ends in an error that names it, or changes nothing."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from engine.disk_faults import FAULTS, READS, WRITES, Outcome

TESTS = Path(__file__).parents[1]
# Two buckets of three tiles: written by both micro-batches, and read again by the second one and the update.
TRANSFERS = {READS: 2 * 6, WRITES: 2 * 6}
FAILED = {READS: "could not be read from", WRITES: "could not be written to"}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    """Of all runs. Each begins with the checkpoint before, beside those that have failed."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("there is no C compiler")
    built, folder = tmp_path_factory.mktemp("library") / "disk_faults.so", tmp_path_factory.mktemp("disk")
    source = TESTS / "helpers/disk_faults.c"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", built, source, "-ldl"], check=True)
    paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"LD_PRELOAD": str(built), "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-P", "-m", "engine.disk_faults", str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    counts, *lines = map(json.loads, done.stdout.splitlines())
    assert {int(direction): seen for direction, seen in counts.items()} == TRANSFERS
    assert [path.name for path in folder.iterdir()] == ["before.ckpt"], "folders are left over"
    return [Outcome(**line) for line in lines]


def wrong(outcome: Outcome) -> bool:
    """Whether a run has ended otherwise than it should."""
    if outcome.fault in ("short", "EAGAIN", "none"):
        return not outcome.same
    where = rf"the gradients of .* {FAILED[outcome.direction]} {re.escape(outcome.file)} at byte [\d,]+: "
    reason, code = {
        "ENOSPC": (r"No space left on device; it needs [\d,]+ bytes, and the file system has [\d,]+ free\. ", None),
        "EIO": ("Input/output error", None),
        "truncated": ("the file ends there; someone has truncated it", errno.EIO),
    }[outcome.fault]
    if outcome.error is None:
        return True
    text, given = outcome.error
    return given != (code or getattr(errno, outcome.fault)) or re.search(where + reason, text) is None


@pytest.mark.slow
def test_a_transfer_of_a_gradient_that_fails_is_named_or_survived(outcomes: list[Outcome]) -> None:
    tried = {(outcome.fault, outcome.direction, outcome.number) for outcome in outcomes}
    for fault in FAULTS:
        for direction in fault.directions:
            assert tried >= {(fault.name, direction, number) for number in range(TRANSFERS[direction])}
    assert {outcome.fault for outcome in outcomes} == {fault.name for fault in FAULTS} | {"truncated", "none"}
    assert not [outcome for outcome in outcomes if wrong(outcome)]
