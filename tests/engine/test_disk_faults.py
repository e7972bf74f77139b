"""Training on a disk that fails: each transfer of a step ends in an error that names it, or changes nothing."""

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
from engine.disk_faults import ENDING, PARTS, READS, SURVIVED, WRITES, Outcome

TESTS = Path(__file__).parents[1]
# Of two buckets of three tiles. Gradients are written by both micro-batches, and read again by the second one and the
# update. Parameters are read by forward and backward of both micro-batches. The update reads and writes them, which are
# the masters, and two moments.
TRANSFERS = {"gradients": {READS: 2 * 6, WRITES: 2 * 6}, "all": {READS: (4 + 3) * 6, WRITES: 3 * 6}}
KINDS = {"gradients": {"the gradients"}, "all": {"the parameters", "exp_avg", "exp_avg_sq"}}
FAILED = {READS: "could not be read from", WRITES: "could not be written to"}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    """Of all runs, by part of the file. Each begins with the checkpoint before, beside those that have failed.

    None of them hangs: all together have a time limit.
    """
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("there is no C compiler")
    built, folder = tmp_path_factory.mktemp("library") / "disk_faults.so", tmp_path_factory.mktemp("disk")
    source = TESTS / "helpers/disk_faults.c"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", built, source, "-ldl"], check=True)
    paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"LD_PRELOAD": str(built), "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-P", "-m", "engine.disk_faults", str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert {path.name for path in folder.iterdir()} == {f"{part}.ckpt" for part in PARTS}, "folders are left over"
    found: dict[str, list[Outcome]] = {}
    for line in map(json.loads, done.stdout.splitlines()):
        if isinstance(line, list):  # the numbers of transfers, before the outcomes
            part, counts = line
            assert {int(direction): seen for direction, seen in counts.items()} == TRANSFERS[part]
        else:
            found.setdefault(line["part"], []).append(Outcome(**line))
    return found


def wrong(outcome: Outcome) -> bool:
    """Whether a run has ended otherwise than it should."""
    if outcome.fault in ("short", "EAGAIN", "none"):
        return not outcome.same
    kinds, file = "|".join(KINDS[outcome.part]), re.escape(outcome.file)
    where = rf"({kinds}) of .* {FAILED[outcome.direction]} {file} at byte [\d,]+: "
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
@pytest.mark.parametrize("part", PARTS)
def test_a_transfer_that_fails_is_named_or_survived(outcomes: dict[str, list[Outcome]], part: str) -> None:
    for direction, count in TRANSFERS[part].items():
        for faults in ENDING, SURVIVED:
            names = {fault.name for fault in faults}
            tried = [o.number for o in outcomes[part] if o.direction == direction and o.fault in names]
            assert tried == list(range(count))
    truncated = {"truncated"} if part == "gradients" else set()
    assert {outcome.fault for outcome in outcomes[part]} == {fault.name for fault in ENDING + SURVIVED} | {
        "none"
    } | truncated
    assert not [outcome for outcome in outcomes[part] if wrong(outcome)]
    for direction in (READS, WRITES):
        errors = [str(o.error[0]) for o in outcomes[part] if o.error is not None and o.direction == direction]
        assert {re.sub(r"^\[Errno \d+\] (.*?) of .*", r"\1", error, flags=re.DOTALL) for error in errors} == KINDS[part]
