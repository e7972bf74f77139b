"""The benchmark of what rounding makes of single weights, in short form."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.benchmark import load


@pytest.fixture
def benchmark() -> Any:
    return load("native_rounding")


def test_weights_drift_apart_where_the_exact_gradient_is_zero_and_nowhere_else(
    benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "result.json"
    monkeypatch.setattr(sys, "argv", f"benchmark --steps 8 --out {out}".split())
    benchmark.main()
    result = json.loads(out.read_text())
    assert len(result["kinds"]) == 2
    for kind in result["kinds"].values():
        assert 0 < kind["weights_without_gradient"] < 0.01 * kind["weights"]
        assert kind["one_update"]["moments"] == 0.0
        assert 0.0 < kind["one_update"]["parameters_in_ulps"] < 16.0
        drifts = kind["largest_difference_from_torch"]
        assert list(drifts) == ["native kernel", "torch, weights one ulp away", "torch in fp64"]
        for drift in drifts.values():
            assert drift["others"] < 4e-6
            assert drift["all"] > 10 * drift["others"]
