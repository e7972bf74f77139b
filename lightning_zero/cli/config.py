"""`lightning-zero config`: asks for a model and a machine, and writes the configuration that fits and is fastest.

`--json` prints one object and asks nothing. Within a schema version fields are added, never renamed or removed.

- `schema`: 1
- `model`, `machine`: as `lightning-zero estimate` has them
- `choice`: an entry of its `choices`: the one that was chosen
- `groups`: the option of each Hydra group; `settings`: values by dotted keys
- `out`: the file that was written; null where none was
- `python`: lines that say the same
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.text import Text

from lightning_zero import limits
from lightning_zero.cgroups import memory_limit
from lightning_zero.cli.estimate import choice_as_json, estimate_all, model_as_json, render, short
from lightning_zero.cli.imagined import EstimateError, Imagined, parse_input
from lightning_zero.cli.questions import Answers, Question, TerminalAnswers, whole
from lightning_zero.cli.request import LEAST, SOME_FOLDER, STANDS, THIS, Request
from lightning_zero.cli.text import complain, number, print_json, size, wide_console
from lightning_zero.config.files import to_yaml
from lightning_zero.integration.choices import PRECISIONS
from lightning_zero.integration.options import NVME_PATH
from lightning_zero.integration.precision import PrecisionName
from lightning_zero.planning.devices import GPUS, Machine, parse_gpu, parse_size
from lightning_zero.planning.estimate import Estimate

SCHEMA = 1
_GIB = 2**30
_KINDS = {
    "--model": "a class, by the path that imports it",
    "--hf": "a folder with a config.json of transformers",
    "--params": "only its size is known",
}
_BY_FLAGS = ("strategy.nvme_path", "strategy.activation_offload")  # what --nvme and --activation-offload have added
_AFTER_CTRL_C = 130  # the exit code, as of the other commands
_WHERE_NOBODY_KNOWS = "24GB"  # a GPU, on a machine that has none


@dataclass(frozen=True)
class Here:
    """Answers that this machine suggests.

    Attributes:
        gpu: "this", or a size for a machine that has none.
        gpus: how many.
        host: memory that a process of it may take.
        nodes: machines of the job that this process is in.
        config: whether a model of transformers lies in this folder.
    """

    gpu: str
    gpus: int
    host: str
    nodes: int
    config: bool

    @classmethod
    def find(cls) -> Here:
        """Asks the machine."""
        available = torch.accelerator.is_available()
        gpu, gpus = (THIS, torch.accelerator.device_count()) if available else (_WHERE_NOBODY_KNOWS, 1)
        memory = [limits.machine_memory().get("MemTotal", limits.physical_memory()), memory_limit()]
        sizes = [nbytes for nbytes in memory if isinstance(nbytes, int)]
        host = f"{min(sizes) / _GIB:.1f}GiB" if sizes else "64GB"
        told = os.environ.get("SLURM_JOB_NUM_NODES", "")
        nodes = max(1, int(told)) if re.fullmatch("[0-9]{1,9}", told) else 1
        return cls(gpu, gpus, host, nodes, Path("config.json").is_file())


def run(
    given: Mapping[str, Any],
    fixed: Mapping[str, Any],
    *,
    experiment: bool,
    overwrite: bool,
    as_json: bool = False,
) -> int:
    """Asks, writes and prints; returns the exit code.

    Args:
        given: answers by flags, which are not asked for; None: to be asked for, or found.
        fixed: of a :class:`Request`, what nobody is asked for.
        experiment: write a file for the group `experiment` of an application.
        overwrite: replace a file.
        as_json: print one JSON object and ask nothing.
    """
    try:
        asks = not as_json and sys.stdin.isatty() and sys.stdout.isatty()
        answers = TerminalAnswers(given) if asks else Answers(given)
        return _run(answers, fixed, experiment, overwrite, as_json)
    except ImportError as error:
        return complain(ImportError(f"questions need questionary: pip install questionary ({error})"))
    except (ValueError, OSError) as error:
        return complain(error)
    except (KeyboardInterrupt, EOFError) as error:
        failed = complain(ValueError("given up; nothing is written"))
        return _AFTER_CTRL_C if isinstance(error, KeyboardInterrupt) else failed


def _run(answers: Answers, fixed: Mapping[str, Any], experiment: bool, overwrite: bool, as_json: bool) -> int:
    console = wide_console()
    request, imagined = _model(answers, fixed)
    machine = request.machine()
    estimates = estimate_all(imagined, machine, request)
    if not as_json:
        console.print(render(imagined, machine, estimates))
    fitting = [each for each in estimates if each.fits]
    if not fitting:
        raise ValueError("nothing fits: the table says what lacks" if not as_json else "nothing fits")
    chosen = answers.ask(_which(fitting))
    groups, settings = configuration(chosen, request)
    lines = python_lines(chosen, request)
    out = None
    if answers.ask(_form()):
        out = answers.ask(_file(overwrite))
        notes = {"data.batch_size": "examples of an optimizer step, over all ranks and micro-batches"}
        text = to_yaml(_remarks(imagined, machine, request, chosen), groups, settings, notes, experiment=experiment)
        out.write_text(text, encoding="utf-8")
    if as_json:
        return print_json(
            SCHEMA,
            {
                "model": model_as_json(imagined),
                "machine": asdict(machine),
                "choice": choice_as_json(chosen),
                "groups": groups,
                "settings": settings,
                "out": None if out is None else str(out),
                "python": lines,
            },
        )
    if out is None:
        console.print(Text("\n".join(lines)))
    else:
        console.print(Text(f"{out}: {' '.join(f'{name}={option}' for name, option in groups.items())}"))
    return 0


# -- the questions ------------------------------------------------------------------------------------------------


def _model(answers: Answers, fixed: Mapping[str, Any]) -> tuple[Request, Imagined]:
    """Asks for model and machine, at a terminal until the model can be made."""
    here = Here.find()
    machine = _machine(answers, here, fixed)
    while True:
        request = Request(**fixed, **machine, **_sizes(answers, here))
        try:
            return request, request.imagine()
        except EstimateError as error:
            if not answers.interactive:
                raise
            complain(error)
            fixed = {**fixed, "changes": ()}  # --set belongs to the model that was refused
            for flag in _OF_MODEL:
                answers.given.pop(flag, None)


def _machine(answers: Answers, here: Here, fixed: Mapping[str, Any]) -> dict[str, Any]:
    gpu = answers.ask(_gpu(here))
    old = Request(gpu=gpu).machine().gpu.name.startswith(("t4", "v100"))
    default = "16-mixed" if old else "bf16-mixed"
    flags = {str(flag): f"{flag}: {name}" for flag, name in PRECISIONS.items()}
    return {
        "gpu": gpu,
        "gpus": answers.ask(Question("--gpus", "How many of them has a machine?", whole, str(here.gpus))),
        "nodes": answers.ask(Question("--nodes", "How many machines?", whole, str(here.nodes))),
        "host": answers.ask(
            Question("--host", "How much memory of a machine may training take?", _size_as_text, here.host)
        ),
        "nvme": answers.ask(
            Question(
                "--nvme",
                "A folder on a local disk for optimizer state (empty: none)?",
                _folder_or_none if fixed.get("disk") is None else _path_or_none,
                os.environ.get(NVME_PATH, ""),
                is_path=True,
            )
        ),
        "precision": answers.ask(Question("--precision", "In which precision?", _precision, default, flags)),
    }


def _gpu(here: Here) -> Question[str]:
    sizes = dict.fromkeys([here.gpu, *GPUS])
    titles = {name: f"{name}: {GPUS[name].memory / _GIB:g} GiB" if name in GPUS else name for name in sizes}
    titles[THIS] = f"{THIS}: this machine's devices or processors, with the rates that doctor --measure has found"
    return Question("--gpu", "Which GPU?", _gpu_as_text, here.gpu, titles)


def _sizes(answers: Answers, here: Here) -> dict[str, Any]:
    """Asks for the model and a batch of it; flags beside the model's go along, for the request to judge."""
    others = {name: read(answers.given[flag]) for flag, (name, read) in _OF_MODEL.items() if flag in answers.given}
    given = [flag for flag in (*_KINDS, "--config") if flag in answers.given]
    kind = given[0] if given else answers.ask(_kind(answers, here))
    if kind == "--params":
        found: dict[str, Any] = {
            "params": answers.ask(Question("--params", "How many parameters?", _amount, "7e9")),
            "layers": answers.ask(Question("--layers", "How many layers?", whole, "32")),
            "hidden": answers.ask(Question("--hidden", "How wide are they?", whole, "4096")),
        }
    elif kind == "--hf":
        found = {"hf": answers.ask(Question("--hf", "In which folder?", Path, ".", is_path=True))}
    else:
        found = _class(answers)
    found["batch"] = answers.ask(Question("--batch", "Examples that a rank takes at once?", whole, "1"))
    if "T" in " ".join(found.get("inputs", ["T"])):
        found["sequence"] = answers.ask(
            Question("--seq", "Tokens of an example (empty: as the model has them)?", _whole_or_none, "")
        )
    if kind in ("--params", "--hf"):
        yes = {"no": "no", "yes": "yes: less memory, a third more to compute"}
        asked = Question("--checkpointing", "Compute layers again in backward?", _yes, "no", yes)
        found["recompute"] = answers.ask(asked)
    return others | found


def _kind(answers: Answers, here: Here) -> Question[str]:
    default = "--hf" if here.config else "--params" if answers.interactive else None
    return Question("--model, --hf or --params", "What is the model?", str, default, _KINDS)


def _class(answers: Answers) -> dict[str, Any]:
    config = answers.ask(
        Question("--config", "A file with its arguments (empty: none)?", _file_or_none, "", None, True)
    )
    default = "" if config is not None or not answers.interactive else None
    model = answers.ask(Question("--model", "Which class, as package.module:Class?", _dotted(config), default))
    inputs = answers.ask(
        Question(
            "--input",
            "The tensors of a batch, such as long:BxT float:Bx3x224x224 (empty: example_input_array of the module)?",
            _forms,
            "",
        )
    )
    return {"config": config, "model": model or None, "inputs": inputs}


def _which(fitting: Sequence[Estimate]) -> Question[Estimate]:
    whole = {short(each.choice): each for each in fitting}
    named = {short(each.choice, *_BY_FLAGS): each for each in fitting}
    titles = {
        name: f"{name}: {size(each.plan.peak.device)} on the device, {size(each.plan.peak.host)} on the host"
        + (f", {each.times.bound:.3g} s" if each.times.compute else "")
        for name, each in whole.items()
    }

    def read(answer: str) -> Estimate:
        found = (named | whole).get(answer if answer.startswith("strategy=") else f"strategy={answer}")
        if found is None:
            names = ", ".join(name.removeprefix("strategy=") for name in named)
            raise ValueError(f"--strategy {answer!r} does not fit, or is none; what fits: {names}")
        return found

    return Question("--strategy", "Which one (the fastest comes first)?", read, next(iter(whole)), titles)


def _form() -> Question[bool]:
    titles = {"hydra": "a Hydra configuration", "python": "lines of Python"}
    return Question("--python", "What shall it be?", lambda answer: answer == "hydra", "hydra", titles)


def _file(overwrite: bool) -> Question[Path]:
    def read(answer: str) -> Path:
        path = Path(answer)
        if path.suffix not in (".yaml", ".yml"):
            raise ValueError(f"{answer!r} is not the name of a YAML file, such as config.yaml")
        if path.exists() and not overwrite:
            raise ValueError(f"{path} exists: give another name, or --overwrite")
        if not path.parent.is_dir():
            raise ValueError(f"{path.parent} is no folder: make it, or give another name")
        return path

    return Question("--out", "Which file?", read, "config.yaml", is_path=True)


def _gpu_as_text(answer: str) -> str:
    if answer != THIS:
        parse_gpu(answer)
    return answer


def _size_as_text(answer: str) -> str:
    parse_size(answer, LEAST)
    return answer


def _precision(answer: str) -> PrecisionName:
    for flag in PRECISIONS:
        if flag == answer:
            return flag
    raise ValueError(f"{answer!r} is no precision; expected one of {', '.join(PRECISIONS)}")


def _amount(answer: str) -> float:
    try:
        return float(answer)
    except ValueError:
        raise ValueError(f"{answer!r} is not a number, such as 7e9") from None


def _yes(answer: str) -> bool:
    return answer in ("yes", "True")


def _whole_or_none(answer: str) -> int | None:
    return whole(answer) if answer else None


def _file_or_none(answer: str) -> Path | None:
    if answer and not Path(answer).is_file():
        raise ValueError(f"{answer} is no file")
    return Path(answer) if answer else None


def _path_or_none(answer: str) -> Path | None:
    return Path(answer) if answer else None


def _folder_or_none(answer: str) -> Path | None:
    if answer and not Path(answer).is_dir():
        raise ValueError(f"{answer} is no folder of this machine; --disk says what one elsewhere may take")
    return Path(answer) if answer else None


def _dotted(config: Path | None) -> Any:
    def read(answer: str) -> str:
        if not re.fullmatch(r"[\w.]+:\w+", answer) and not (config and not answer):
            raise ValueError(f"{answer!r} is not the path of a class, such as package.module:Class")
        return answer

    return read


def _forms(answer: str) -> list[str]:
    forms = answer.split()
    for form in forms:
        parse_input(form, 1, 1)
    return forms


# The flags that say what the model is: the names of their answers in a request, and how they are read.
_OF_MODEL: dict[str, tuple[str, Callable[[str], Any]]] = {
    "--model": ("model", str),
    "--config": ("config", Path),
    "--input": ("inputs", _forms),
    "--hf": ("hf", Path),
    "--params": ("params", _amount),
    "--layers": ("layers", whole),
    "--hidden": ("hidden", whole),
    "--checkpointing": ("recompute", _yes),
}


# -- what is written --------------------------------------------------------------------------------------------------


def configuration(chosen: Estimate, request: Request) -> tuple[dict[str, str], dict[str, Any]]:
    """The option of each Hydra group, and values by dotted keys, of what was chosen."""
    groups = {}
    settings: dict[str, Any] = {}
    for name, value in chosen.choice.overrides.items():
        if "." in name:
            settings[name] = value
        else:
            groups[name] = value
    if request.accumulate > 1:
        settings["trainer.accumulate_grad_batches"] = request.accumulate
    settings["data.batch_size"] = request.batch * request.accumulate * request.gpus * request.nodes
    return groups, settings


def python_lines(chosen: Estimate, request: Request) -> list[str]:
    """The same as lines of Python."""
    call, _, optimizer = chosen.choice.python.partition("  # ")
    if request.accumulate > 1:
        call = f"{call[:-1]}, accumulate_grad_batches={request.accumulate})"
    lines = ["import lightning as L", "import lightning_zero", "", f"trainer = {call}"]
    lines += [f"# in configure_optimizers: {optimizer}"] if optimizer else []
    return [*lines, *(f"# {remark}" for remark in _stands(chosen))]


def _remarks(imagined: Imagined, machine: Machine, request: Request, chosen: Estimate) -> list[str]:
    peak = chosen.plan.peak
    takes = f"{size(peak.device)} of its device and {size(peak.host)} of host memory"
    return [
        f"{imagined.name} on {machine.nodes} x {machine.gpus} x {machine.gpu.name}, by lightning-zero config.",
        f"A rank takes {takes} at the peak of a step, with activations.",
        f"The DataLoader of a rank takes {number(request.batch, 'example')} at once.",
        *_stands(chosen),
    ]


def _stands(chosen: Estimate) -> list[str]:
    return [STANDS] if chosen.choice.overrides.get("strategy.nvme_path") == SOME_FOLDER else []
