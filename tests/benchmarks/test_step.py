"""The benchmark of optimizer steps runs, goes on where it was, and finds who trains something else."""

from __future__ import annotations

import importlib.util
import json
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.benchmark import forking, load
from helpers.pages import ROOT
from helpers.ranks import RankPool, server_environment
from torch import Tensor
from torch.nn import functional

NAMES = "zero0 zero1 zero2 zero3 zero1_offload zero2_offload zero3_offload".split()


@pytest.fixture
def benchmark() -> Any:
    return load("step")


@pytest.fixture
def run(benchmark: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Runs the benchmark with options; contestants take as many seconds as their names have letters."""

    def measure(contestant: Any, cell: Any, options: Namespace) -> dict[str, Any]:
        largest = {"seconds": len(contestant.name), "peak_gib": 2.0, "peak_of_steps_gib": 1.0}
        return largest | {"loss": 5.0, "of_each_step": [1.0], "seconds_with_start": 1.0}

    monkeypatch.setattr(benchmark, "ask", lambda python, expression: "")
    monkeypatch.setattr(benchmark, "check_interpreters", lambda field, against: None)
    monkeypatch.setattr(benchmark, "measure", measure)

    def run(*options: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["benchmark", "--out", str(tmp_path / "out.json"), *options])
        benchmark.main()
        result: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())
        return result

    return run


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")  # that they are replaced
def test_products_of_bf16_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward of a linear layer round the products of fp32, until the replacement ends."""
    own, made = torch.mm, list[torch.dtype]()

    def noting(a: Tensor, b: Tensor, **options: Any) -> Tensor:
        made.append(a.dtype)
        return own(a, b, **options)

    monkeypatch.setattr(torch, "mm", noting)
    x, weight, gradient = (torch.randn(*shape, dtype=torch.bfloat16) for shape in ((3, 70), (5, 70), (3, 5)))
    bias = torch.randn(5, dtype=torch.bfloat16)
    x.requires_grad_()
    weight.requires_grad_()
    replaced = load("step_rank").multiply_in_fp32()
    found = functional.linear(x, weight, bias)
    found.backward(gradient)
    del replaced
    assert made == [torch.float32] * 2
    with torch.no_grad():
        right = torch.addmm(bias.float(), x.float(), weight.float().t()), gradient.float() @ weight.float()
        expected = *right, gradient.float().t() @ x.float()
        assert all(map(torch.equal, (found, x.grad, weight.grad), (each.bfloat16() for each in expected)))
        functional.linear(x, weight)
    assert len(made) == 2


@pytest.mark.slow
def test_a_small_run(
    new_ranks: Callable[[int], RankPool], benchmark: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = ["forward_backward", "ddp", "ddp_no_masters", "fsdp2", "zero2"]
    names += ["deepspeed2"] if importlib.util.find_spec("deepspeed") else []
    out = tmp_path / "result.json"
    options = (
        f"--models tiny --precisions bf16 --micro-batches 2 --rounds 1 --warmup 2 --steps 2 --tokens 16 --out {out}"
    )
    for name, value in server_environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["benchmark", *options.split(), "--only", *names])
    monkeypatch.setattr(benchmark, "run_ranks", forking(new_ranks, benchmark.run_ranks, "deepspeed2"))
    benchmark.main()
    result = json.loads(out.read_text())
    assert result["environment"]["torch"]
    assert list(tmp_path.iterdir()) == [out]
    (cell,) = result["cells"].values()
    (found,) = cell["rounds"]
    assert sorted(found) == sorted(cell["summary"]) == sorted(names)
    for name in names:
        of_rank_0 = sum(found[name]["of_each_step"]) / 2
        assert found[name]["seconds"] >= 0.999 * of_rank_0 > 0  # that of the slowest rank
        assert found[name]["peak_gib"] >= found[name]["peak_of_steps_gib"] > 0.1
        assert cell["summary"][name]["to_ddp"] == found[name]["seconds"] / found["ddp"]["seconds"]


def test_ratios_of_rounds(run: Callable[..., dict[str, Any]], benchmark: Any) -> None:
    result = run("--rounds", "2", "--models", "26m", "--micro-batches", "1", "--against", str(ROOT))
    assert list(result["cells"]) == ["26m bf16 x1", "26m fp32 x1"]
    summary = result["cells"]["26m fp32 x1"]["summary"]
    assert list(summary) == ["forward_backward", "ddp", "fsdp2", *NAMES, *(f"before {name}" for name in NAMES)]
    assert summary["zero2"]["to_ddp"] == summary["zero2"]["to_ddp_min"] == 5 / 3
    assert summary["zero2"]["to_before"] == 5 / 12
    assert summary["zero2"]["to_fsdp2"] == 5 / 5
    assert "to_deepspeed" not in summary["zero2"]
    (row, *_) = benchmark.summary(
        [{name: {"seconds": 2.0} for name in ("zero2_offload", "deepspeed2_offload")}]
    ).values()
    assert row["to_deepspeed"] == row["to_deepspeed_min"] == 1.0
    assert "ddp_no_masters" in result["cells"]["26m bf16 x1"]["summary"]


def test_resuming_measures_what_is_missing(run: Callable[..., dict[str, Any]]) -> None:
    options = "--models", "26m", "--precisions", "bf16", "--micro-batches", "1"
    first = run("--rounds", "2", "--only", "ddp", "zero2", *options)
    rounds = first["cells"]["26m bf16 x1"]["rounds"]
    more = run("--rounds", "3", "--only", "ddp", "zero2", "--resume", *options)["cells"]["26m bf16 x1"]["rounds"]
    assert len(rounds) == 2
    assert len(more) == 3
    again = run("--rounds", "1", "--only", "ddp", "zero3", "--resume", *options)
    assert [list(one) for one in again["cells"]["26m bf16 x1"]["rounds"]] == [["ddp", "zero2"]] * 3 + [["ddp", "zero3"]]
    assert len(again["environment"]["resumed"]) == 2
    with pytest.raises(SystemExit, match=r"was measured with steps=5; expected steps=6: name another file with --out"):
        run("--steps", "6", "--resume", *options)


def test_existing_results_are_replaced_on_request_only(
    run: Callable[..., dict[str, Any]], benchmark: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = "--models", "26m", "--precisions", "bf16", "--micro-batches", "1", "--rounds", "1", "--only", "ddp"
    run(*options)
    kept = (tmp_path / "out.json").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(benchmark, "measure", None)
        with pytest.raises(
            SystemExit, match=r"out\.json exists; .* --resume, .* --out, or replace it with --overwrite"
        ):
            run(*options)
    assert (tmp_path / "out.json").read_bytes() == kept
    assert len(run(*options, "--overwrite")["cells"]["26m bf16 x1"]["rounds"]) == 1


def test_a_round_that_was_cut_short_goes_on(
    run: Callable[..., dict[str, Any]], benchmark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = "--models", "26m", "--precisions", "bf16", "--micro-batches", "1", "--rounds", "1", "--resume"
    measure, measured = benchmark.measure, list[str]()

    def cut_short(contestant: Any, *rest: Any) -> dict[str, Any]:
        measured.append(contestant.name)
        if len(measured) == 3:
            raise KeyboardInterrupt
        found: dict[str, Any] = measure(contestant, *rest)
        return found

    monkeypatch.setattr(benchmark, "measure", cut_short)
    with pytest.raises(KeyboardInterrupt):
        run("--only", *NAMES, *options)
    cell = run("--only", *NAMES, *options)["cells"]["26m bf16 x1"]
    assert len(measured) == len(NAMES) + 1
    assert [list(one) for one in cell["rounds"]] == [NAMES]
    assert "begun" not in cell


@pytest.mark.parametrize("loss", [5.1, float("nan")])
def test_who_trains_something_else_is_found(benchmark: Any, loss: float) -> None:
    cell = benchmark.Cell("26m", "fp32", 1)
    benchmark.check({"ddp": {"loss": 5.0}, "zero2": {"loss": 5.001}}, cell)
    with pytest.raises(RuntimeError, match=r"zero2 ends at loss .* in 26m fp32 x1, ddp at 5: they have not"):
        benchmark.check({"zero2": {"loss": loss}, "ddp": {"loss": 5.0}}, cell)


def test_what_a_failing_rank_says_is_told(benchmark: Any, tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text("import os, time\nif os.environ['RANK'] == '1': raise ValueError('no room')\ntime.sleep(60)\n")
    contestant = benchmark.Contestant("zero2", "zero2", sys.executable)
    with pytest.raises(RuntimeError, match=r"rank 1 of zero2 ended with 1:(.|\n)*no room"):
        benchmark.run_ranks(contestant, script, {"folder": str(tmp_path)}, 2, {}, 60)


@pytest.mark.parametrize("before", [True, False])
def test_an_abort_counts_unless_the_result_is_there(benchmark: Any, tmp_path: Path, before: bool) -> None:
    lines = ["os.abort()", "pathlib.Path(f'rank{os.environ[\"RANK\"]}.json').write_text('7')"]
    script = tmp_path / "rank.py"
    script.write_text("\n".join(["import os, pathlib", *(lines if before else reversed(lines))]))
    ranks = benchmark.Contestant("fsdp2", "fsdp2", sys.executable), script, {"folder": str(tmp_path)}, 2, {}, 60
    if before:
        with pytest.raises(RuntimeError, match=r"rank . of fsdp2 ended with -6"):
            benchmark.run_ranks(*ranks)
    else:
        assert benchmark.run_ranks(*ranks) == [7, 7]


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs shared memory as of Linux")
def test_shared_memory_that_deepspeed_leaves_is_removed(benchmark: Any, tmp_path: Path) -> None:
    script, name = tmp_path / "rank.py", "deepspeed_allreduce_buffer_0_{MASTER_ADDR}_{MASTER_PORT}_{RANK}"
    script.write_text(
        "import os, pathlib\n"
        f"left = pathlib.Path('/dev/shm') / '{name}'.format(**os.environ)\n"
        "left.touch()\n"
        "pathlib.Path(f'rank{os.environ[\"RANK\"]}.json').write_text(f'\"{left}\"')\n"
    )
    contestant = benchmark.Contestant("deepspeed2", "deepspeed2", sys.executable)
    left = benchmark.run_ranks(contestant, script, {"folder": str(tmp_path)}, 2, {}, 60)
    assert len({*left}) == 2
    assert not any(Path(path).exists() for path in left)
