"""`lightning-zero estimate`: what it says of models from classes, of transformers and of sizes alone."""

from __future__ import annotations

import json
import re
import shlex
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from lightning_zero import ZeroStrategy
from lightning_zero.cli import app
from lightning_zero.integration.choices import choices
from lightning_zero.integration.names import STRATEGIES
from lightning_zero.planning.devices import GPUS, USABLE, parse_gpu, parse_size
from lightning_zero.planning.estimate import Times
from lightning_zero.planning.tracing import trace

GIB = 2**30
SEVEN = "--params 7e9 --layers 32 --hidden 4096 --seq 2048 --precision bf16-true"


def invoke(arguments: str) -> Result:
    return CliRunner().invoke(app, ["estimate", *shlex.split(arguments)], catch_exceptions=False)


def found(arguments: str) -> dict[str, Any]:
    result = invoke(f"{arguments} --json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_seven_billion_parameters_on_one_gpu_get_a_line_to_paste() -> None:
    result = invoke(f"{SEVEN} --gpu 24GB --host 128GB --checkpointing")
    assert result.exit_code == 0
    *_, hydra, python = (line.strip() for line in result.stdout.strip().splitlines())
    name = re.match(r"python train.py strategy=(\w+) precision=bf16_true trainer.devices=1$", hydra)
    assert name, hydra
    assert STRATEGIES[name[1]]["offload_optimizer"] == "cpu"
    assert python == f'L.Trainer(strategy="{name[1]}", precision="bf16-true", devices=1)'
    rows = {words[2]: words for line in result.stdout.splitlines() if (words := line.split("│"))[2:]}
    assert any("no: device" in row[1] for row in rows.values())
    assert len(rows) >= len(STRATEGIES)


def test_every_name_is_there_with_what_it_takes() -> None:
    """16 bytes per parameter in bf16 with fp32 masters, 2 of them of gradients (https://arxiv.org/abs/1910.02054)."""
    report = found(f"{SEVEN} --gpu h100 --gpus 8 --host 2TB")
    numel = report["model"]["parameters"]
    assert numel == pytest.approx(7e9, rel=1e-3)
    by_name = {
        each["hydra"].split()[0]: each for each in reversed(report["choices"]) if len(each["hydra"].split()) == 3
    }
    assert by_name.keys() == {f"strategy={name}" for name in STRATEGIES if "nvme" not in name}
    assert by_name["strategy=zero0"]["device_held_bytes"] == pytest.approx(16 * numel, rel=0.01)
    assert by_name["strategy=zero3"]["device_held_bytes"] == pytest.approx(2 * numel, rel=0.01)
    offloaded = by_name["strategy=zero2_offload"]
    assert offloaded["device_held_bytes"] == pytest.approx(2 * numel, rel=0.01)
    assert offloaded["host_held_bytes"] == pytest.approx(14 * numel / 8, rel=0.02)
    assert offloaded["copied_to_device_bytes"] == pytest.approx(2 * numel / 8, rel=0.01)
    for each in report["choices"]:
        assert each["device_peak_bytes"] >= each["device_held_bytes"]
        assert each["fits"] == (each["device_fits"] and each["host_fits"])
        assert each["device_fits"] == (each["device_peak_bytes"] <= USABLE * 80 * GIB)
        assert each["host_fits"] == (8 * each["host_peak_bytes"] <= 2 * 10**12)
        assert each["step_seconds"] >= each[f"{each['limit']}_seconds"]


def test_names_with_a_disk_count_where_there_is_one(tmp_path: Path) -> None:
    """12 bytes per parameter rest there: masters and two moments, which a step reads and writes."""
    small = "--params 1.52e9 --layers 4 --hidden 5120 --precision bf16-true --gpu 24GB"
    report = found(f"{small} --host 16GB --disk 1TB --disk-rate 4GB")
    numel = report["model"]["parameters"]
    best = report["choices"][0]
    assert re.match(r"strategy=zero\d_nvme strategy\.nvme_path=/local_nvme precision=", best["hydra"])
    assert best["fits"]
    by_name = {each["hydra"].split()[0]: each for each in reversed(report["choices"])}
    assert {f"strategy={name}" for name in STRATEGIES} == by_name.keys()
    whole = by_name["strategy=zero2_nvme"]  # masters and state in fp32: the first of its rows
    assert whole["disk_held_bytes"] == pytest.approx(12 * numel, rel=0.01)
    assert whole["disk_seconds"] == pytest.approx(2 * whole["disk_held_bytes"] / 4e9)
    assert (whole["limit"], whole["step_seconds"] >= whole["disk_seconds"]) == ("disk", True)
    assert not any(each["fits"] for each in report["choices"] if re.search("offload prec.*=1$", each["hydra"]))
    tight = found(f"{small} --host 16GB --disk 1GB")
    assert not any(each["disk_fits"] for each in tight["choices"] if each["disk_held_bytes"])
    here = invoke(f"{small} --host 16GB --nvme {tmp_path}")
    assert f'nvme_path="{tmp_path}"' in here.stdout or f"strategy.nvme_path={tmp_path}" in here.stdout
    assert "--nvme nowhere is no folder" in invoke(f"{small} --nvme nowhere").stderr


CLASS = "--config examples/gpt2/conf/model/nano.yaml --model examples.gpt2.model:GPT --set n_layer=1"
BATCH = "--input long:BxT --input long:BxT --batch 4 --seq 32 --precision 32-true"


def test_a_class_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    report = found(f"{CLASS} {BATCH}")
    from examples.gpt2.model import GPT

    with torch.device("meta"):
        model = GPT(1, 4, 128, 64, dropout=0.0)

    def loss(twin: Any) -> torch.Tensor:
        return twin.training_step((torch.zeros(4, 32, dtype=torch.long),) * 2)

    with warnings.catch_warnings(action="ignore"):  # it logs, without a Trainer
        expected = trace(model, loss)
    assert report["model"]["parameters"] == sum(p.numel() for p in model.parameters())
    assert (report["model"]["flops"], report["model"]["activation_bytes"]) == (expected.flops, expected.peak)
    assert not any(each["fits"] and not each["device_fits"] for each in report["choices"])


def test_without_a_batch_there_are_no_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    report = found(CLASS)
    assert report["model"]["activation_bytes"] is None
    assert "no --input" in report["model"]["note"]


def test_activations_that_rest_in_host_memory() -> None:
    request = f"{SEVEN} --gpu h100 --gpus 2 --host 1TB --batch 4 --accumulate 3"
    kept, moved = (found(f"{request} {more}") for more in ("", "--activation-offload"))
    without = {each["hydra"]: each for each in kept["choices"]}
    layers = 32 * 34 * 4 * 2048 * 4096  # bytes, as the formula has them
    assert kept["model"]["activation_bytes"] - moved["model"]["activation_bytes"] > 0.9 * layers
    for each in moved["choices"]:
        assert "activation_offload=True" in each["python"]
        before = without[each["hydra"].replace(" strategy.activation_offload=True", "")]
        assert each["host_peak_bytes"] - before["host_peak_bytes"] == pytest.approx(layers, rel=1e-6)
        assert each["copied_to_host_bytes"] - before["copied_to_host_bytes"] == 3 * layers
        assert each["copied_to_device_bytes"] - before["copied_to_device_bytes"] < 3 * layers


@pytest.mark.slow
def test_a_class_that_recomputes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    kept, recomputed = (
        found(f"{CLASS} {BATCH} --set n_layer=3 {more}")["model"]
        for more in ("", "--set activation_checkpointing=true")
    )
    assert recomputed["activation_bytes"] < kept["activation_bytes"]
    assert recomputed["flops"] > kept["flops"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "vit"])
def test_models_of_transformers_are_traced(tmp_path: Path, kind: str) -> None:
    configs = {
        "gpt2": {"architectures": ["GPT2LMHeadModel"], "n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 99},
        "vit": {
            "architectures": ["ViTForImageClassification"],
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
        },
    }
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **configs[kind]}))
    report = found(f"--hf {tmp_path} --batch 2")
    assert report["model"]["note"].startswith("traced on 2")
    assert report["model"]["activation_bytes"] > 0
    assert found(f"--hf {tmp_path} --batch 2 --checkpointing")["model"]["flops"] > report["model"]["flops"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "give --model package.module:Class"),
        ("--params 7e9", "--params needs --layers and --hidden"),
        ("--params 7e9 --layers 2 --hidden 64", "does not go with layers=2"),
        (f"{SEVEN} --gpu 5080ti", "'5080ti' is no known GPU; expected a size such as 24GB, or one of t4"),
        (f"{SEVEN} --gpu 900GB", "more memory than a known GPU has"),
        (f"{SEVEN} --host plenty", "'plenty' is not a size"),
        ("--model torch.nn:Linear --set in_features=4", "torch.nn.Linear cannot be made"),
        ("--model torch.nn:Linear --set in_features=4 --set out_features=4 --input long:BxQ", "is not the form"),
        ("--model torch.nn:Linear --set in_features=4 --set out_features=4 --input float:BxT", "has a T; give --seq"),
        ("--model torch.nn:Linear --set in_features=4 --set out_features=4 --input float:Bx3", "cannot run on 1x3"),
        ("--hf nowhere", "has no config.json"),
    ],
)
def test_wrong_arguments_say_what_to_give(arguments: str, message: str) -> None:
    result = invoke(arguments)
    assert result.exit_code == 1
    assert not result.stdout
    assert message in result.stderr


def test_sizes_and_gpus() -> None:
    assert parse_size("128GB") == 128 * 10**9
    assert parse_size("1.5 GiB") == 3 * 2**29
    assert parse_gpu("A100").name == "a100-80"
    imagined = parse_gpu("24GB")
    assert (imagined.memory, imagined.matmul_16) == (24 * GIB, GPUS["3090"].matmul_16)
    assert [gpu.memory for gpu in GPUS.values()] == sorted(gpu.memory for gpu in GPUS.values())


def test_every_choice_is_a_strategy() -> None:
    """The line for Python makes the strategy whose setting was planned."""
    offered = list(choices(2, 2, "bf16-mixed"))
    assert len({choice.hydra for choice in offered}) == len(offered)
    assert {choice.hydra.split()[0].removeprefix("strategy=") for choice in offered} == {
        n for n in STRATEGIES if "nvme" not in n
    }
    for choice in offered:
        argument = re.match(
            r"L\.Trainer\(strategy=(.*), precision=\"bf16-mixed\", devices=2, num_nodes=2\)", choice.python
        )
        assert argument
        made = re.fullmatch(r"lightning_zero\.ZeroStrategy\((.*)\)", argument[1])
        strategy = ZeroStrategy(**(eval(f"dict({made[1]})") if made else STRATEGIES[argument[1].strip('"')]))  # noqa: S307
        setting = choice.setting
        assert (setting.max_live_numel, setting.params_memory == "host") == (
            strategy.max_live_numel,
            strategy.offload_params == "cpu",
        )
        assert (setting.optimizer_memory == "host") == (strategy.offload_optimizer == "cpu")
        assert setting.shard_size == (1 if strategy.stage == 0 else strategy.shard_size or 2)


def test_the_bound_is_the_longest_and_the_update() -> None:
    times = Times(compute=3.0, network=2.0, pcie=4.0, update=1.0)
    assert (times.bound, times.limit) == (5.0, "pcie")
