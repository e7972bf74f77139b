"""Training started as users start it: Lightning's own launchers and torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.started import HERE, environment
from e2e.train_tiny import RECIPE
from strategy.fits import assert_same, reference

SCRIPT = HERE / "train_tiny.py"
PLAIN = [sys.executable, str(SCRIPT)]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(SCRIPT)]
LIMIT = 400.0  # seconds; about 11 on idle cores

pytestmark = pytest.mark.launch


def launch(command: list[str], folder: Path, *trainings: dict[str, Any]) -> tuple[int, str, float]:
    """Run the script, whose trainings write `0.pt` and so on: its exit status, output, and seconds taken.

    Nothing of it outlives the call.
    """
    begin = time.monotonic()
    process = subprocess.Popen(
        [*command, json.dumps([{"out": str(folder / f"{number}.pt")} | each for number, each in enumerate(trainings)])],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"not ended after {LIMIT:g} s:\n{output}")
    print(output)
    return process.returncode, output, time.monotonic() - begin


def check_weights(file: Path, strategy: Any) -> None:
    assert_same(torch.load(file, weights_only=True), reference(strategy, RECIPE, 2).weights)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "strategy", "rank"),
    [(PLAIN, "zero2_offload", 0), (TORCHRUN, "zero2", 1)],
    ids=["popen, rank 0", "torchrun, rank 1"],
)
def test_a_run_trains_as_one_process_would_until_a_rank_raises(
    command: list[str], strategy: str, rank: int, tmp_path: Path
) -> None:
    """One launch for both: to start ranks is what takes the time."""
    status, output, seconds = launch(command, tmp_path, {"strategy": strategy}, {"strategy": "zero3", "fail_on": rank})
    check_weights(tmp_path / "0.pt", strategy)
    assert status != 0
    assert f"LookupError: rank {rank} gave up" in output
    if command is PLAIN:  # torchrun has a report of its own
        assert f"rank {rank} " in output.splitlines()[-1]  # whichever rank printed it
    assert not (tmp_path / "1.pt").exists()
    assert seconds < LIMIT


@pytest.mark.slow
def test_forked_and_spawned_ranks_train_as_one_process_would(tmp_path: Path) -> None:
    """After a spawned run the main process has the whole module, at stage 3 too; state on a disk goes with its rank."""
    disk = tmp_path / "disk"
    disk.mkdir()
    on_disk = {"offload_optimizer": "nvme", "nvme_path": str(disk)}
    strategies = [{"stage": 2, "start_method": "fork", **on_disk}, {"stage": 3, "start_method": "spawn"}]
    status, _, _ = launch(PLAIN, tmp_path, *({"strategy": strategy} for strategy in strategies))
    assert status == 0
    assert not [*disk.iterdir()]
    for number, strategy in enumerate(strategies):
        check_weights(tmp_path / f"{number}.pt", strategy)


@pytest.mark.slow
def test_the_last_line_names_a_rank_that_was_killed(tmp_path: Path) -> None:
    status, output, _ = launch(PLAIN, tmp_path, {"strategy": "zero2", "fail_on": 1, "killed": True})
    assert status != 0
    assert "rank 1 was ended by SIGKILL, nearly always because host memory ran out" in output.splitlines()[-1]
