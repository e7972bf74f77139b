"""The script that compares trainings before and after a refactor finds what differs, and nothing else."""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.benchmark import load
from helpers.ranks import RankPool

SMALL = {
    "strategy": "zero2_offload",
    "precision": "bf16-mixed",
    "world_size": 2,
    "optimizer": "adamw",
    "accumulate": 1,
    "clipping": "norm",
    "model": "tied",
    "feature": "plain",
    "layout": "small",
    "container": "full",
}


@pytest.fixture(scope="module")
def identity() -> Any:
    return load("identity")  # its import takes seconds


def record(folder: str, **changes: Any) -> dict[str, list[str]]:
    """What is recorded of a training on this rank."""
    identity = load("identity")
    identity.quiet()
    return identity.run(identity.Training(**(SMALL | changes)), Path(folder)).parts


@pytest.mark.slow
def test_trainings_that_are_the_same_agree_and_others_do_not(pool2: RankPool, tmp_path: Path, identity: Any) -> None:
    found = []
    for number, rate in enumerate((1.0, 1.0, 1.001)):
        folder = tmp_path / str(number)
        folder.mkdir()
        records = pool2.run(record, os.fspath(folder), rate=rate)
        assert all(lines for lines in records[0].values())
        found.append({"training": identity.digests(records)})
    first, again, faster = found
    assert identity.differences(first, again) == {}
    assert identity.differences(first, faster) == {"training": ["norms", "losses", "weights", "states", "checkpoint"]}
    assert identity.differences(first, {}) == {"training": ["only before"]}
    assert identity.differences({}, first) == {"training": ["only after"]}


def test_every_pair_of_settings_is_met(identity: Any) -> None:
    trainings = identity.matrix()
    assert trainings == identity.matrix()
    assert len(trainings) == len({training.name for training in trainings}) >= 132
    assert all(training.valid for training in trainings)
    pairs = set().union(*(training.pairs() for training in trainings))
    for name, values in identity.SETTINGS.items():
        assert {getattr(training, name) for training in trainings} == set(values)
    assert frozenset({("strategy", "zero3"), ("feature", "units")}) in pairs
    assert frozenset({("precision", "16-true"), ("feature", "overflow")}) in pairs


def test_versions_and_random_names_are_left_out_and_other_values_are_not() -> None:
    recording = load("recording")

    def digest(version: str, name: str, value: str) -> str:
        return recording.of_pickle(
            pickle.dumps(
                {
                    "lightning_zero": {"version": version, "stage": value},
                    "save_id": name,
                    "file": f"__0_0_{name}.distcp",
                },
                2,
            )
        )

    first, second = "0123456789abcdef", "fedcba9876543210"
    assert digest("1", first, "x") == digest("2", second, "x") != digest("1", first, "y")


def work(arguments: bytes) -> None:
    """What a process of the script does, in a new rank; its arguments are pickled objects of the script."""
    script = load("identity")
    script.work(int(os.environ["RANK"]), *pickle.loads(arguments))


@pytest.mark.slow
def test_the_script_compares_with_a_file(
    new_ranks: Callable[[int], RankPool],
    identity: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    def start_processes(function: Any, arguments: tuple[Any, ...], nprocs: int, start_method: str) -> None:
        assert (function, start_method) == (identity.work, "spawn")
        new_ranks(nprocs).run(work, pickle.dumps(arguments))

    monkeypatch.setattr(identity.mp, "start_processes", start_processes)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    before, after = tmp_path / "before.json", tmp_path / "after.json"

    def run(*options: object) -> None:
        monkeypatch.setattr(sys, "argv", ["benchmark", "--only", "^zero1 32-true w1", *map(str, options)])
        identity.main()

    run("--out", before, "--trace", tmp_path / "trace")
    assert any((tmp_path / "trace").iterdir())
    result = json.loads(before.read_text())
    name, *others = result["trainings"]
    assert others
    result["trainings"][name]["norms"] = ""
    before.write_text(json.dumps(result))
    with pytest.raises(SystemExit) as ended:
        run("--out", after, "--against", before)
    assert ended.value.code == 1
    assert f"\n{name}: norms\n1 of {len(others) + 1} trainings differ; norms: 1\n" in capsys.readouterr().out
