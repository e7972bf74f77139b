"""Every command and every Python block of README and docs runs, in short form.

Examples run inside rank pools, with the printed overrides and then those that make them short; `lightning-zero` runs on
small checkpoints. A command that nobody here can run fails, unless `NOT_RUN` says why, or a comment above its block.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import typer
from helpers.deepspeed_folder import Folder, write_folder
from helpers.images import write_files
from helpers.pages import PAGES, ROOT, blocks, commands
from helpers.ranks import RankError, RankPool
from helpers.scripts import SHORT, Run, run_script, short_run
from lightning import LightningModule
from lightning.pytorch.accelerators import CUDAAccelerator
from omegaconf import OmegaConf
from safetensors import safe_open
from strategy.fits import make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typer.testing import CliRunner

import lightning_zero
from lightning_zero.cli import app
from lightning_zero.cli.disk import measure_disk
from lightning_zero.cli.rates import measure_all

NOT_RUN = {
    "make test": "it is what runs this",
    "make test-slow": "it is what runs the slow tests",
    "make docs": "it installs mkdocs",
    "lightning-zero config": "it asks at a terminal: tests/cli/test_config.py answers",
    "make test-lightning LIGHTNING=DIR": "it takes a copy of Lightning: see tests/benchmarks/test_lightning_suite.py",
    "make wheel": "it compiles for minutes; the workflow of a release does it",
}
TEXT_DATA = ["data=text", "data.path=input.txt"]  # the default reads the standard library, which takes a second
RESULTS = {  # what scripts leave
    "train": ["run/summary.json", "run/checkpoints/last.ckpt"],
    "fabric": ["run/last.ckpt"],
    "predict": ["run/predictions.csv"],
    "prepare": ["data/train.bin", "data/val.bin"],
    "generate": [],
}
TEXT = "It's the year 2026: Éva\n\n\tdoesn't count_all, isn't it? \r\n — 中文 <|endoftext|>\n" * 40


def verb_of(name: str) -> Any:
    group: Any = typer.main.get_command(app)
    return group.commands[name]


def is_mention(command: str) -> bool:
    """Whether a page only names a verb that needs arguments."""
    program, *arguments = command.split()
    return (
        program == "lightning-zero"
        and len(arguments) == 1
        and (arguments == ["estimate"] or any(parameter.required for parameter in verb_of(arguments[0]).params))
    )


PRINTED = sorted({command for page in PAGES for command in commands(page) if not is_mention(command)})
README = set(commands(ROOT / "README.md"))


def starting_with(*programs: str, but: tuple[str, ...] = ()) -> list[str]:
    """The printed commands of these programs."""
    found = [command for command in PRINTED if command.startswith(programs) and not command.startswith(but)]
    return [command for command in found if command not in NOT_RUN or programs == ("make ",)]


# -- examples --


def shortened(command: str, first: Sequence[str] = ()) -> Run:
    """What a command runs, in short form; its own overrides win over those that come first."""
    launcher, *words = shlex.split(command)
    at = next(number for number, word in enumerate(words) if word.endswith(".py"))
    run = short_run(ROOT / words[at], [*first, *words[at + 1 :]])
    assert launcher != "torchrun" or words[:at] == ["--nproc_per_node", str(run.world_size)]
    return run


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, rank_pools: Callable[[int], RankPool]) -> Path:
    """A folder in which the commands of the pages were typed before: data, a vocabulary and checkpoints of runs."""
    import tokenizers

    folder = tmp_path_factory.mktemp("shell")
    (folder / "input.txt").write_text(TEXT)
    vocabulary = tokenizers.ByteLevelBPETokenizer()
    vocabulary.train_from_iterator([TEXT], vocab_size=300, show_progress=False)
    for name in ("vocab", "data"):
        (folder / name).mkdir()
    vocabulary.save_model(str(folder / "vocab"))
    for name in ("train.bin", "val.bin"):
        (folder / "data" / name).write_bytes(bytes([1, 0, 2, 0]) * 200)
    write_files(folder / "data" / "cifar-10", 4)
    for example in ("gpt2", "cifar10"):
        run = shortened(f"python examples/{example}/train.py")
        earlier = ["trainer.max_steps=2", f"hydra.run.dir=outputs/{example}/..."]  # the path that the pages print
        rank_pools(1).run(run_script, run.script, [*run.arguments, *earlier], folder)
    return folder


@pytest.fixture
def run_short(
    prepared: Path, tmp_path: Path, rank_pools: Callable[[int], RankPool]
) -> Callable[[str, Sequence[str]], None]:
    """Runs a script's command in short form, and looks for what it leaves."""
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)

    def run(command: str, first: Sequence[str] = ()) -> None:
        short = shortened(command, first)
        results = [] if "--help" in short.arguments else [tmp_path / name for name in RESULTS[short.script.stem]]
        for path in results:
            path.unlink(missing_ok=True)
        rank_pools(short.world_size).run(run_script, short.script, short.arguments, tmp_path)
        assert all(path.stat().st_size > 0 for path in results)
        if (summary := tmp_path / "run" / "summary.json").exists():
            report = json.loads(summary.read_text())
            assert (report["steps"], report["world_size"]) == (SHORT["trainer.max_steps"], short.world_size)

    return run


def marked(commands: list[str]) -> list[Any]:
    """Slow are all but the help and one of README's trainings; `make demo`, which README has, too, is another."""
    fast = {command for command in README if "--help" in command or "experiment=tutorial" in command}
    return [pytest.param(c, id=c, marks=[] if c in fast else [pytest.mark.slow]) for c in commands]


@pytest.mark.parametrize("command", marked(starting_with("python ", "torchrun ", but=("python -m benchmarks.",))))
def test_examples(command: str, run_short: Callable[..., None]) -> None:
    run_short(command, TEXT_DATA if re.search(r"gpt2/(train|fabric)\.py", command) and "--help" not in command else ())


def test_the_help_of_every_program_begins_with_a_command_that_works() -> None:
    pages = sorted((ROOT / "examples").glob("*/conf/*.yaml"))
    assert len(pages) == 5
    for page in pages:
        header = OmegaConf.to_container(OmegaConf.load(page))["hydra"]["help"]["header"]
        (command,) = re.findall(r"^  (python examples/.*)$", header, re.MULTILINE)
        run = shortened(command.replace("${hydra.job.name}", page.stem))
        assert run.script == page.parent.with_name(f"{page.stem}.py")


def test_the_help_of_a_program_without_groups_lists_none(pool1: RankPool, capsys: pytest.CaptureFixture[str]) -> None:
    pool1.run(run_script, ROOT / "examples" / "gpt2" / "prepare.py", ["--help"], ROOT)
    printed = capsys.readouterr().out
    assert "Writes a text as the files train.bin and val.bin" in printed
    assert "tokenizer: bytes" in printed
    assert "strategy:" not in printed


@pytest.mark.parametrize(
    "command", [pytest.param(c, marks=pytest.mark.slow if "ARGS" in c else []) for c in starting_with("make ")]
)
def test_targets(command: str, run_short: Callable[..., None]) -> None:
    words = [*shlex.split(command), "--dry-run", "--no-print-directory"]
    # Without what the make that runs this hands on to others.
    outside = {name: value for name, value in os.environ.items() if "MAKE" not in name and name != "ARGS"}
    process = subprocess.run(words, cwd=ROOT, env=outside, capture_output=True, text=True, check=True)
    recipe = process.stdout.splitlines()[-1]
    if command not in NOT_RUN:
        run_short(recipe, TEXT_DATA if "ARGS" in command else ())


def test_what_is_not_run_is_printed() -> None:
    assert set(NOT_RUN) <= set(PRINTED)


@pytest.mark.parametrize("command", starting_with("python -m benchmarks."))
def test_benchmarks_have_tests(command: str) -> None:
    check_benchmark(command)


def check_benchmark(command: str) -> None:
    """It has these options and a test of its own, which runs it."""
    module, *arguments = shlex.split(command)[2:]
    source = (ROOT / module.replace(".", "/")).with_suffix(".py").read_text()
    for option in arguments:
        assert not option.startswith("--") or f'"{option}"' in source, option
    tests = [path.read_text() for path in (ROOT / "tests" / "benchmarks").glob("test_*.py")]
    called = f'("{module.removeprefix("benchmarks.")}"'  # by load or a fixture
    assert any(called in text for text in tests), module


@pytest.mark.parametrize(
    "command",
    [
        "python examples/gpt2/train.py strategy=zero4",
        "python examples/gpt2/train.py optimizer.learning_rate=1",
        "python examples/gpt3/train.py",
    ],
)
def test_an_example_that_is_not_there_is_found(command: str) -> None:
    with pytest.raises(Exception, match=r"zero4|learning_rate|gpt3"):
        shortened(command)


def test_a_benchmark_that_is_not_there_is_found() -> None:
    with pytest.raises(AssertionError, match="--dta"):
        check_benchmark("python -m benchmarks.cifar10_strategies --dta data/cifar-10")
    with pytest.raises(AssertionError, match=r"benchmarks\.stream"):
        check_benchmark("python -m benchmarks.stream")


def test_a_script_that_fails_is_found(tmp_path: Path, pool1: RankPool) -> None:
    run = shortened("python examples/gpt2/train.py", ["data=text", "data.path=none.txt"])
    with pytest.raises(RankError, match=r"none\.txt"):
        pool1.run(run_script, run.script, run.arguments, tmp_path)


# -- lightning-zero --


class Model(LightningModule):
    """What the pages call `Model`: blocks and a head, trained for two steps."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(4, 1)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return self.head(batch).square().mean()

    def on_train_epoch_end(self) -> None:
        self.trainer.should_stop = True

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.ones(4, 4), batch_size=1)


class Block(nn.Sequential):
    """A block of it."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.Tanh())


@pytest.fixture(scope="module")
def saved(prepared: Path, pool2: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of the example with the model of transformers: a file, a folder, in compact form, of DeepSpeed."""
    folder = tmp_path_factory.mktemp("saved")
    run = shortened(f"python examples/gpt2/train.py model=hf_gpt2 trainer.devices=2 {shlex.join(TEXT_DATA)}")
    kinds = {
        "full": [],
        "sharded": ["strategy.checkpoint_format=sharded"],
        "compact": ["strategy.checkpoint_state=compact", "optimizer=adamw8bit"],
    }
    for kind, more in kinds.items():
        options = ["strategy=zero3", f"hydra.run.dir={folder}/run", "trainer.max_steps=2", *more]
        pool2.run(run_script, run.script, [*run.arguments, *options], prepared)
        (folder / "run" / "checkpoints" / "last.ckpt").rename(folder / kind)
    checkpoint = torch.load(folder / "full", weights_only=True)
    names = {name for group in checkpoint["optimizer_states"][0]["param_groups"] for name in group["params"]}
    write_folder(folder / "deepspeed", checkpoint, set(), set(checkpoint["state_dict"]) - names, Folder(3))
    return folder


def lightning_zero_command(arguments: list[str]) -> str:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def outputs() -> dict[str, str]:
    """What pages show as the end of an estimate's output, by the command above it."""
    found = {}
    for page in PAGES:
        for block, following in itertools.pairwise(blocks(page)):
            if block.code.startswith("lightning-zero estimate ") and following.code.startswith("The fastest "):
                found[shlex.join(shlex.split(block.code.splitlines()[0]))] = following.code
    return found


def test_the_readme_shows_what_estimate_answers() -> None:
    assert outputs().keys() & README


@pytest.mark.parametrize("command", starting_with("lightning-zero "), ids=str)
def test_verbs(command: str, prepared: Path, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On checkpoints of the example: `...` is a run with our own model, the others one with that of transformers."""
    _, *arguments = shlex.split(command)
    of_files = {"convert-deepspeed": "deepspeed", "consolidate": "compact"}
    kind = of_files.get(arguments[0], "full")
    if "last.ckpt/" in arguments and kind != "deepspeed":
        kind = "sharded"
    (tmp_path / "last.ckpt").symlink_to(saved / kind)
    (tmp_path / "outputs" / "gpt2" / "hf" / "checkpoints").mkdir(parents=True)
    (tmp_path / "outputs" / "gpt2" / "hf" / "checkpoints" / "last.ckpt").symlink_to(saved / kind)
    (tmp_path / "outputs" / "gpt2" / "...").symlink_to(prepared / "outputs" / "gpt2" / "...")
    (tmp_path / "ds_config.json").write_text('{"zero_optimization": {"stage": 2}}')
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lightning_zero.cli.doctor.measure_disk", functools.partial(measure_disk, seconds=0.01))
    monkeypatch.setattr(
        "lightning_zero.cli.doctor.measure_all", functools.partial(measure_all, seconds=0.001, nbytes=4096)
    )
    monkeypatch.setattr("lightning_zero.cli.rates.measure_gather", lambda *_: 1e9)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "outputs"))
    printed = lightning_zero_command([str(tmp_path) if a == "/local_nvme" else a for a in arguments])
    assert printed
    assert printed.endswith(outputs().get(command, ""))
    given = ("last.ckpt", "outputs", "ds_config.json", "examples")
    made = [path for path in tmp_path.iterdir() if path.name not in given]
    for path in made:
        assert path.read_text() if path.suffix == ".yaml" else weights_in(path), path
    assert len(made) == (arguments[0] not in ("inspect", "doctor", "estimate"))


def weights_in(path: Path) -> list[str]:
    """Names in a checkpoint or an export, which transformers loads where it is one for them."""
    if (path / "config.json").exists():
        from transformers import AutoModelForCausalLM

        model, about = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
        assert not any(about.values()), about
        return list(model.state_dict())
    if path.is_dir():
        with safe_open(path / "model.safetensors", "pt") as file:
            return list(file.keys())
    return list(torch.load(path, weights_only=True)["state_dict"])


# -- Python --


class Source(NamedTuple):
    """A Python block of a page; `output`: the block after it, if that is what it prints."""

    page: str
    code: str
    output: str | None


def sources() -> list[Source]:
    found = {}
    for page in PAGES:
        all_blocks = blocks(page)
        for block, following in itertools.zip_longest(all_blocks, all_blocks[1:]):
            if block.language == "python" and block.tested:
                prints = "print(" in block.code and following is not None and not following.language
                found.setdefault(block.code, Source(page.stem, block.code, following.code if prints else None))
    return list(found.values())


def run_block(source: Source, folder: Path) -> str:
    """What it prints, on this rank, where the names that it does not define are what the text says."""
    os.chdir(folder)
    names: dict[str, Any] = {"Model": Model, "MyLightningModule": Model, "model": Model(), "self": Model()}
    names |= {"torch": torch, "lightning_zero": lightning_zero, "trainer": make_trainer("zero3")}
    on_cpu = mock.patch.object(CUDAAccelerator, "is_available", staticmethod(lambda: False))
    with on_cpu, contextlib.redirect_stdout(io.StringIO()) as out:
        names = runpy.run_path("block.py", init_globals=names)
    if "trainer.fit(" in source.code:
        assert names["trainer"].global_step > 0
    return out.getvalue()


@pytest.mark.parametrize("source", sources(), ids=lambda source: f"{source.page} {source.code.splitlines()[-1]}")
def test_python_blocks(source: Source, pool2: RankPool, tmp_path: Path) -> None:
    torch.save({"state_dict": Model().state_dict(), "pytorch-lightning_version": "2.6.6"}, tmp_path / "last.ckpt")
    (tmp_path / "block.py").write_text(source.code)
    printed = pool2.run(run_block, source, tmp_path)[0]
    if source.output is not None:
        assert printed == source.output
