"""The benchmark of the optimizers runs, and does not time what does nothing."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.benchmark import load


@pytest.fixture
def benchmark() -> Iterator[Any]:
    """The module; threads are restored."""
    threads = torch.get_num_threads()
    yield load("cpu_optimizers")
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_a_small_run(benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "result.json"
    monkeypatch.setattr(benchmark, "PAUSE", 0.0)
    monkeypatch.setattr(sys, "argv", f"benchmark --numel 4100 --threads 1 2 --rounds 2 --out {out}".split())
    benchmark.main()
    result = json.loads(out.read_text())
    assert result["numel"] == 4096
    assert list(result["runs"]) == ["1", "2"]
    for run in result["runs"].values():
        assert set(run["rows"]) == set(run["seconds"])
        assert all(len(times) == 2 for times in run["seconds"].values())
        with_stream = {name for name in run["rows"] if name.startswith("STREAM")}
        assert len(with_stream) == (6 if shutil.which("cc") else 0)
        assert all(ratio["min"] <= ratio["median"] for ratio in run["ratios"])


def test_a_disturbed_stream_stays_on_the_chart(benchmark: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    row = {"ms_per_1e9": 100.0, "share_of_stream": 40.0}
    runs = {threads: {"rows": {f"ours avx2: layout {k}": row for k in range(12)}} for threads in ("1", "2")}
    result = {"numel": 1024, "environment": {"cpu": "a processor with a long name"}, "runs": runs}
    benchmark.plot(result, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 0


def test_a_contestant_that_does_nothing_is_found(benchmark: Any) -> None:
    arrays = benchmark.Arrays(1024)
    field = benchmark.torch_contestants(arrays)
    benchmark.check(field, arrays)
    idle = dataclasses.replace(field[0], step=lambda factor: None)
    with pytest.raises(RuntimeError, match="torch for-loop is off by"):
        benchmark.check([idle], arrays)


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_stream_that_leaves_out_elements_is_found(benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = benchmark.Arrays(1024)
    stream = benchmark.Stream()
    benchmark.check_stream(stream, arrays, 2)
    run = stream.run

    def half(layout: str, *, param: torch.Tensor, **rest: object) -> None:
        run(layout, param=param[:512], **rest)

    monkeypatch.setattr(stream, "run", half)
    with pytest.raises(RuntimeError, match="missed arrays"):
        benchmark.check_stream(stream, arrays, 2)
