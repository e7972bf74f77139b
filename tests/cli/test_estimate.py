"""`lightning-zero estimate`: what it says of models from classes, of transformers and of sizes alone."""

from __future__ import annotations

import json
import re
import shlex
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from lightning_zero import ZeroStrategy
from lightning_zero.cli import app
from lightning_zero.cli.estimate import typed
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
    assert offloaded["host_held_bytes"] == pytest.approx(14 * numel / 8 + 2**28, rel=0.01)  # and staging memory
    assert offloaded["copied_to_device_bytes"] == pytest.approx(2 * numel / 8, rel=0.01)
    for each in report["choices"]:
        assert each["device_peak_bytes"] >= each["device_held_bytes"]
        assert each["fits"] == (each["device_fits"] and each["host_fits"])
        assert each["device_fits"] == (each["device_peak_bytes"] <= USABLE * 80 * GIB)
        assert each["host_fits"] == (8 * each["host_peak_bytes"] <= 2 * 10**12)
        assert each["step_seconds"] >= each[f"{each['limit']}_seconds"]


def test_names_with_a_disk_count_where_there_is_one(tmp_path: Path) -> None:
    """14 bytes per parameter rest there: masters, two moments, 16-bit gradients, which a step reads and writes."""
    small = "--params 1.52e9 --layers 4 --hidden 5120 --precision bf16-true --gpu 24GB"
    report = found(f"{small} --host 16GB --disk 1TB --disk-rate 4GB")
    numel = report["model"]["parameters"]
    best = report["choices"][0]
    assert re.match(r"strategy=zero\d_nvme strategy\.nvme_path=/local_nvme precision=", best["hydra"])
    assert best["fits"]
    by_name = {each["hydra"].split()[0]: each for each in reversed(report["choices"])}
    assert {f"strategy={name}" for name in STRATEGIES} == by_name.keys()
    whole = by_name["strategy=zero2_nvme"]  # masters and state in fp32: the first of its rows
    assert whole["disk_held_bytes"] == pytest.approx(14 * numel, rel=0.01)
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
        ("--params 7e9 --layers 2 --hidden 64", "contradicts layers=2"),
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


MODELS = """
import torch
from torch import nn

class Plain(nn.Module):
    def __init__(self, **sizes):
        super().__init__()
        self.lin = nn.Linear(4, 4)
    def forward(self, x): return self.lin(x)
class Needs(nn.Module):
    def __init__(self, width): super().__init__()
class Raises(nn.Module):
    def __init__(self): raise KeyError("boom")
class Ends(nn.Module):
    def __init__(self): raise SystemExit(3)
class Empty(nn.Module):
    def forward(self, x): return x.sum()
class Frozen(Plain):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
class Lazy(Plain):
    def __init__(self):
        super().__init__()
        self.lin = nn.LazyLinear(4)
class Complex(Plain):
    def __init__(self):
        super().__init__()
        self.p = nn.Parameter(torch.zeros(4, dtype=torch.complex64))
class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(10, 4, sparse=True)
class Fails(Plain):
    def forward(self, x): raise KeyError("gone")
class NoLoss(Plain):
    def forward(self, x): return {"logits": self.lin(x)}
class Nothing(Plain):
    def forward(self, x): return ()
class Asserts(Plain):
    def forward(self, x): assert len(x) == 7, "seven"
class Mixed(Plain):
    def __init__(self):
        super().__init__()
        self.tied = nn.Linear(4, 4, bias=False, dtype=torch.float64)
        self.tied.weight = self.lin.weight
        self.empty = nn.Parameter(torch.zeros(0))
        self.register_buffer("count", torch.zeros(10, dtype=torch.int64))
class Example(Plain):
    def __init__(self):
        super().__init__()
        self.example_input_array = (torch.zeros(2, 4), torch.zeros(2, 1))
    def forward(self, x, scale): return self.lin(x) * scale
    def training_step(self, batch):
        x, scale, target = batch
        return ((self(x, scale) - target) ** 2).mean()
"""
FILES = {
    "odd_models.py": MODELS.encode(),
    "odd_import.py": b"raise RuntimeError('broken')",
    "odd_syntax.py": b"def (:",
    "empty.yaml": b"",
    "twice.yaml": b"a: 1\na: 2\n",
    "list.json": b"[1, 2]",
    "half.json": b"{",
    "latin.yaml": b"a: \xe9",
    "binary.yaml": b"\x00\xde\xad",
    "number.yaml": b"3",
    "absent.yaml": b"width: ${nowhere}",
    "hf_list/config.json": b"[1, 2]",
    "hf_binary/config.json": b"\x00\xde\xad",
    "hf_empty/config.json": b"",
    "hf_nothing/config.json": b"{}",
    "hf_words/config.json": b'{"model_type": "gpt2", "n_layer": "two"}',
    "hf_zero/config.json": b'{"model_type": "gpt2", "n_embd": 0, "n_layer": 1}',
    "hf_class/config.json": b'{"model_type": "gpt2", "architectures": ["Nope"]}',
    "hf_headless/config.json": b'{"model_type": "gpt2", "architectures": ["GPT2Model"], "n_layer": 1, "n_embd": 48}',
    "hf_folder/config.json/x": b"",
}
ODD = {
    "--params nan --layers 2 --hidden 64": "--params nan is no number of parameters; expected one such as 7e9",
    "--params inf --layers 2 --hidden 64": "--params inf is no number",
    "--params -7 --layers 2 --hidden 64": "--params -7 is no number",
    "--params 1e30 --layers 10 --hidden 100000000000000": "larger than any can be",
    "--params 7e9 --layers 99999999 --hidden 2 --vocab 3": "too many to plan; expected at most 10000",
    "--hf hf_zero --layers 3": "--layers needs --params",
    "--hf hf_zero --input long:BxT": "--input needs --model",
    "--params 7e9 --layers 2 --hidden 64 --set n_layer=3": "--set needs --model",
    "--model odd_models:Plain --checkpointing": "--checkpointing needs --params or --hf",
    f"{SEVEN} --hf hf_zero": "--params and --hf name different models; give one of them",
    f"{SEVEN} --model odd_models:Plain": "--params and --model name different models",
    f"{SEVEN} --gpu 0GB": "'0GB' is too little memory for a GPU",
    f"{SEVEN} --gpu 1.2.3GB": "'1.2.3GB' is no known GPU",
    f"{SEVEN} --gpu -5GB": "'-5GB' is no known GPU",
    f"{SEVEN} --host 128": "--host '128' is 128 bytes; expected at least 1000000: give a unit",
    f"{SEVEN} --host 1e400GB": "--host '1e400GB' is not a size",
    f"{SEVEN} --dram 0GB": "--dram '0GB' is 0 bytes",
    f"{SEVEN} --network 0 --nodes 2": "--network '0' is 0 bytes",
    f"{SEVEN} --disk 1TB --disk-rate 0": "--disk-rate '0' is 0 bytes",
    f"{SEVEN} --disk 5PB": "--disk '5PB' is not a size",
    "--hf hf_folder": "--hf hf_folder has no config.json",
    "--hf hf_list": "no model can be made of hf_list/config.json",
    "--hf hf_binary": "hf_binary/config.json: OSError",
    "--hf hf_empty": "hf_empty/config.json: OSError",
    "--hf hf_nothing": "Should have a `model_type` key",
    "--hf hf_words": "hf_words/config.json",
    "--hf hf_zero": "hf_zero/config.json: ZeroDivisionError",
    "--hf hf_class": "has no class Nope, which hf_class/config.json names",
    "--hf hf_headless": "without a loss; name a class with a head",
    "--model odd_models": "'odd_models' is not the path of a class, such as package.module:Class",
    "--model odd_absent:X": "No module named 'odd_absent'",
    "--model odd_import:X": "odd_import.X cannot be made: RuntimeError: broken",
    "--model odd_syntax:X": "SyntaxError: invalid syntax",
    "--model odd_models:Needs": "missing 1 required positional argument: 'width'",
    "--model odd_models:Raises": "odd_models.Raises cannot be made: KeyError: 'boom'",
    "--model odd_models:Ends": "odd_models.Ends cannot be made: SystemExit: 3",
    "--model odd_models:Empty": "no parameter that requires a gradient: there is nothing to train",
    "--model odd_models:Frozen --input float:Bx4": "no parameter that requires a gradient",
    "--model odd_models:Lazy --input float:Bx4": "'lin.weight' is a UninitializedParameter",
    "--model odd_models:Complex --input float:Bx4": "sharding needs real, dense parameters",
    "--model odd_models:Sparse --input long:Bx4": "sparse gradients cannot be sharded. Use sparse=False",
    "--model odd_models:Fails --input float:Bx4": "cannot run on 1x4 without values: KeyError: 'gone'",
    "--model odd_models:NoLoss --input float:Bx4": "the model returns a dict without a loss",
    "--model odd_models:Nothing --input float:Bx4": "the model returns a tuple without a loss",
    "--model odd_models:Asserts --input float:Bx4": "AssertionError: seven",
    f"--model odd_models:Plain --input long:Bx{9:0<22}": "has more elements than a tensor can",
    "--model odd_models:Plain --set x": "--set 'x' is no argument; expected NAME=VALUE",
    '--model odd_models:Plain --set "x=[1"': "--set cannot be read",
    "--model odd_models:Plain --config nowhere.yaml": "--config nowhere.yaml is no file",
    "--model odd_models:Plain --config hf_list": "--config hf_list is no file",
    "--model odd_models:Plain --config list.json": "list.json holds a list; expected a mapping",
    **{
        f"--model odd_models:Plain --config {name}": f"--config {name} cannot be read as a mapping"
        for name in ("twice.yaml", "half.json", "latin.yaml", "binary.yaml", "number.yaml", "absent.yaml")
    },
}


@pytest.fixture
def odd_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The working folder has files that are wrong."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    for name, content in FILES.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content)
    yield
    sys.modules.pop("odd_models", None)


@pytest.mark.usefixtures("odd_files")
@pytest.mark.parametrize("kind", ["--params", "--hf", "--model"])
def test_every_odd_request_ends_with_one_message(kind: str) -> None:
    mine = {arguments: message for arguments, message in ODD.items() if arguments.startswith(kind)}
    assert mine
    for arguments, message in mine.items():
        result = CliRunner().invoke(app, ["estimate", *shlex.split(arguments), "--json"])
        said = f"{arguments}: {result.exception!r} {result.stderr}"
        assert (result.exit_code, result.stdout) == (1, ""), said
        assert message in result.stderr, said
        assert re.fullmatch("error: [^\n]+\n", result.stderr), said


@pytest.mark.usefixtures("odd_files")
def test_models_that_are_odd_and_right() -> None:
    """No arguments in a file, ties, two dtypes, a buffer of integers, a parameter without elements, three machines."""
    model = "--model odd_models:Mixed --config empty.yaml --input float:Bx4"
    mixed = found(f"{model} --precision 32-true --gpus 1 --nodes 3")
    assert (mixed["model"]["parameters"], mixed["choices"][0]["fits"]) == (4 * 4 + 4, True)
    assert mixed["choices"][0]["python"].endswith("devices=1, num_nodes=3)")


@pytest.mark.usefixtures("odd_files")
def test_an_example_input_array_goes_to_forward_with_the_batch_that_is_asked_for() -> None:
    model = found("--model odd_models:Example --batch 16 --gpu h100")["model"]
    assert model["activation_bytes"] > 0
    assert model["note"] == "traced on 16x4, 16x1"


def test_sizes_and_gpus() -> None:
    sizes = {
        "128GB": 128 * 10**9,
        "1.5 GiB": 3 * 2**29,
        "1.5 kb": 1500,
        "2TiB": 2**41,
        "7": 7,
        "3B": 3,
        "5G": 5 * 10**9,
    }
    assert {text: parse_size(text) for text in sizes} == sizes
    for text in ("", "GB", "0", "-1GB", "0.5B", "5 bytes", "1IB", "1i", "5PB"):
        with pytest.raises(ValueError, match=f"^'{text}' is .*; expected"):
            parse_size(text)
    assert parse_gpu("A100").name == parse_gpu("NVIDIA A100").name == "a100-80"
    assert parse_gpu("GeForce RTX 4090").name == parse_gpu("rtx4090").name == "4090"
    assert parse_gpu("24576MiB").memory == 24 * GIB
    imagined = parse_gpu("24GB")
    assert (imagined.memory, imagined.matmul_16) == (24 * GIB, GPUS["3090"].matmul_16)
    assert [gpu.memory for gpu in GPUS.values()] == sorted(gpu.memory for gpu in GPUS.values())


def test_every_choice_is_a_strategy() -> None:
    """The line for Python makes the strategy whose setting was planned."""
    offered = list(choices(2, 2, "bf16-mixed"))
    assert len({typed(choice.overrides) for choice in offered}) == len(offered)
    assert {choice.overrides["strategy"] for choice in offered} == {n for n in STRATEGIES if "nvme" not in n}
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
