"""`lightning-zero config`: what it asks, what it writes, and that this trains."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest
import torch
from helpers.ranks import RankPool
from helpers.terminal import CLEAR, DOWN, ENTER, Terminal
from hydra import compose, initialize_config_dir
from strategy.fits import Lit, Recipe
from typer.testing import CliRunner, Result

from lightning_zero.cli import app, config, request
from lightning_zero.cli.questions import Answers
from lightning_zero.config import build_trainer
from lightning_zero.planning.devices import Machine
from lightning_zero.planning.machine import known_gpu, this_machine

LARGE = "--params 1.52e9 --layers 4 --hidden 5120 --gpu 16GB --host 64GB --precision bf16-true"
SMALL = "--params 2e6 --layers 2 --hidden 128 --gpu 24GB --host 16GB"
FLAGS = [
    "trainer.accelerator=cpu",
    "trainer.max_steps=2",
    *(f"trainer.enable_{what}=false" for what in ("progress_bar", "checkpointing", "model_summary")),
]


def invoke(arguments: str) -> Result:
    return CliRunner().invoke(app, ["config", *shlex.split(arguments)], catch_exceptions=False)


def fit(folder: Path, name: str) -> tuple[int, str]:
    """The steps that a configuration trains, and its strategy."""
    with initialize_config_dir(str(folder), version_base="1.3"):
        cfg = compose(name, [*FLAGS, "logger=none"])
    trainer = build_trainer(cfg)
    recipe = Recipe(steps=3)
    trainer.fit(Lit(recipe))
    return trainer.global_step, repr(trainer.strategy.options)  # type: ignore[attr-defined]


def test_flags_and_defaults_answer_where_there_is_no_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke(f"{LARGE} --accumulate 4")
    assert result.exit_code == 0, result.stderr
    assert "The fastest that fits" in result.stdout
    text = (tmp_path / "config.yaml").read_text()
    assert "  - strategy: zero1_offload\n  - precision: bf16_true\n" in text
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        cfg = compose("config")
    assert (cfg.strategy.stage, cfg.strategy.offload_optimizer) == (1, "cpu")
    assert (cfg.trainer.accumulate_grad_batches, cfg.data.batch_size) == (4, 4)

    again = invoke(LARGE)
    assert (again.exit_code, (tmp_path / "config.yaml").read_text()) == (1, text)
    assert "config.yaml exists: give another name, or --overwrite" in again.stderr


def test_another_name_as_an_experiment_and_in_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    other = json.loads(invoke(f"{LARGE} --strategy zero3_offload --experiment --out mine.yaml --json").stdout)
    assert other["groups"] == {"strategy": "zero3_offload", "precision": "bf16_true"}
    assert other["python"][-1] == 'trainer = L.Trainer(strategy="zero3_offload", precision="bf16-true", devices=1)'
    assert (tmp_path / "mine.yaml").read_text().startswith("# @package _global_\n")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # without rates that were measured
    this = json.loads(invoke("--params 7e6 --layers 2 --hidden 128 --gpu this --python --json").stdout)
    assert this["machine"]["gpu"]["memory"] == this_machine(torch.device("cpu"), 1, 1).gpu.memory
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "1(x3)")  # which says nothing
    on_disk = json.loads(invoke(f"{LARGE} --disk 1TB --strategy zero2_nvme --out disk.yaml --json").stdout)
    assert on_disk["python"][-1] == "# /local_nvme stands for a folder on the disk."
    assert "# /local_nvme stands for a folder on the disk.\n" in (tmp_path / "disk.yaml").read_text()
    lines = invoke(f"{LARGE} --strategy zero2_offload --python").stdout.splitlines()
    assert lines[-1] == 'trainer = L.Trainer(strategy="zero2_offload", precision="bf16-true", devices=1)'
    moved = json.loads(invoke(f"{LARGE} --activation-offload --strategy zero3_offload --out moved.yaml --json").stdout)
    assert moved["settings"]["strategy.activation_offload"] is True


@pytest.mark.parametrize(("name", "precision"), [("Tesla T4", "16-mixed"), ("NVIDIA H100 80GB HBM3", "bf16-mixed")])
def test_the_gpu_of_this_machine_is_the_default(monkeypatch: pytest.MonkeyPatch, name: str, precision: str) -> None:
    """With its name, which says more than its memory: a T4 is too old for bf16."""
    gpu = known_gpu(name, int(14.6 * 2**30))
    monkeypatch.setattr(request, "machine_here", lambda ranks, nodes: Machine(gpu, ranks, nodes, 2**36, 1e9, 1e9))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)
    found = config._machine(Answers({}), config.Here.find(), {})
    assert (found["gpu"], found["gpus"], found["precision"]) == ("this", 8, precision)


def test_a_name_on_a_disk_whose_folder_has_a_blank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name alone is an answer, and the folder's name stays in one piece: in the file, and as it is typed."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "my disk, (1)"
    folder.mkdir()
    nvme = f"--params 7e6 --layers 2 --hidden 128 --disk 1TB --nvme {shlex.quote(str(folder))}"
    made = json.loads(invoke(f"{nvme} --strategy zero3_nvme --json").stdout)
    assert made["groups"]["strategy"] == "zero3_nvme"
    typed = shlex.split(made["choice"]["hydra"])
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        for cfg in (compose("config"), compose("config", typed)):
            assert cfg.strategy.nvme_path == str(folder)
    row = shlex.quote(shlex.join(typed[:2]))  # as the table has it
    whole = json.loads(invoke(f"{nvme} --strategy {row} --out b.yaml --json").stdout)
    assert whole["choice"] == made["choice"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "--model, --hf or --params is needed: What is the model?"),
        (f"{LARGE} --strategy zero0", "--strategy 'zero0' does not fit, or is none; what fits: zero1_offload, "),
        (f"{LARGE} --host 8GB", "nothing fits"),
        (f"{LARGE} --out config.json", "'config.json' is not the name of a YAML file"),
        ("--model torch.nn", "'torch.nn' is not the path of a class"),
        (f"{SMALL} --hf .", "--params and --hf name different models; give one of them"),
        (f"{SMALL} --model torch.nn:Linear", "--params and --model name different models"),
        ("--hf . --layers 2", "--layers needs --params"),
        (f"{SMALL} --input float:Bx4", "--input needs --model"),
        ("--model torch.nn:Linear --checkpointing", "--checkpointing needs --params or --hf"),
        (f"{LARGE} --gpu 5080ti", "'5080ti' is no known GPU"),
    ],
)
def test_what_is_missing_or_wrong_is_named(
    arguments: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke(arguments)
    assert result.exit_code == 1
    assert message in result.stderr
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_not_written_is_not_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for flag in ("--out a.yaml", "--experiment", "--overwrite"):
        result = invoke(f"{SMALL} --python {flag}")
        assert (result.exit_code, result.stdout) == (2, "")
        assert f"Invalid value for {flag.split()[0]}: --python writes no file" in result.stderr


@pytest.mark.slow
def test_what_a_person_answers_at_a_terminal_trains(tmp_path: Path, pool2: RankPool) -> None:
    command = [sys.executable, "-P", "-m", "lightning_zero.cli", "config", "--gpus", "2", "--set", "n_layer=4"]
    with Terminal(command, tmp_path) as terminal:
        terminal.answer("Which GPU?", DOWN + ENTER)
        terminal.answer("How many machines?")
        terminal.answer("How much memory", CLEAR + "plenty" + ENTER)  # refused, and asked again
        terminal.answer("is not a size", CLEAR + "64GB" + ENTER)
        terminal.answer("A folder on a local disk")
        terminal.answer("In which precision?", DOWN + ENTER)
        terminal.answer("What is the model?")
        terminal.answer("How many parameters?", CLEAR + "2e6" + ENTER)
        terminal.answer("How many layers?", CLEAR + "4" + ENTER)
        terminal.answer("How wide are they?", CLEAR + "32" + ENTER)
        terminal.answer("rank takes at once?", CLEAR + "2" + ENTER)
        terminal.answer("Tokens of an example", "16" + ENTER)
        terminal.answer("Compute layers again")
        terminal.expect("--set needs --model")  # asked again, without it
        terminal.answer("What is the model?")
        terminal.answer("How many parameters?", CLEAR + "2e6" + ENTER)
        terminal.answer("How many layers?", CLEAR + "4" + ENTER)
        terminal.answer("How wide are they?", CLEAR + "512" + ENTER)  # too wide for so few parameters
        terminal.answer("rank takes at once?", CLEAR + "2" + ENTER)
        terminal.answer("Tokens of an example", "16" + ENTER)
        terminal.answer("Compute layers again")
        terminal.expect("contradicts layers=4")  # asked again
        terminal.answer("What is the model?")
        terminal.answer("How many parameters?", CLEAR + "1.63e6" + ENTER)
        terminal.answer("How many layers?", CLEAR + "2" + ENTER)
        terminal.answer("How wide are they?", CLEAR + "32" + ENTER)
        terminal.answer("rank takes at once?", CLEAR + "2" + ENTER)
        terminal.answer("Tokens of an example", "16" + ENTER)
        terminal.answer("Compute layers again")
        terminal.expect("The fastest that fits")
        terminal.answer("Which one (the fastest comes first)?", DOWN + ENTER)
        terminal.answer("What shall it be?")
        terminal.answer("Which file?", CLEAR + "mine.yaml" + ENTER)
        assert terminal.exit_code() == 0, terminal.printed
    assert "trainer.devices=2" in terminal.printed
    text = (tmp_path / "mine.yaml").read_text()
    assert "batch_size: 4 # examples of an optimizer step" in text
    for steps, _ in pool2.run(fit, tmp_path, "mine"):
        assert steps == 2


@pytest.mark.slow
def test_who_gives_up_at_a_terminal_has_no_file(tmp_path: Path) -> None:
    with Terminal([sys.executable, "-P", "-m", "lightning_zero.cli", "config", *SMALL.split()], tmp_path) as terminal:
        terminal.answer("How many of them has a machine?", "\x03")
        assert terminal.exit_code() == 130
    assert "given up; nothing is written" in terminal.printed
    assert not list(tmp_path.iterdir())
