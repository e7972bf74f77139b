"""The command `lightning-zero`.

Every subcommand has its own module, which is imported when it runs, so that help is printed without importing torch.
The docstrings of the functions are the help texts. Their lines are printed as they are here: 78 columns at most.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from lightning_zero.version import __version__

__all__ = ["app", "main"]

app = typer.Typer(name="lightning-zero", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

_BEFORE, _CHECKPOINTS = "Before a run", "Checkpoints"


class _Format(StrEnum):
    safetensors = "safetensors"
    hf = "hf"


class _Precision(StrEnum):
    fp32 = "32-true"
    fp64 = "64-true"
    bf16 = "bf16-mixed"
    bf16_true = "bf16-true"
    fp16 = "16-mixed"
    fp16_true = "16-true"


class _Dtype(StrEnum):
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
_Checkpoint = Annotated[Path, typer.Argument(metavar="CKPT", help="A checkpoint file or folder.", show_default=False)]
# Options that estimate and config share.
_Model = Annotated[str | None, typer.Option(metavar="MODULE:CLASS", help="The class of the model.")]
_Hf = Annotated[Path | None, typer.Option(help="The folder of a model of transformers, with its config.json.")]
_Params = Annotated[float | None, typer.Option(help="The number of parameters of a transformer, such as 7e9.")]
_Layers = Annotated[int | None, typer.Option(min=1, help="The number of layers, with --params.")]
_Hidden = Annotated[int | None, typer.Option(min=1, help="The width of the layers, with --params.")]
_Accumulate = Annotated[int, typer.Option(min=1, help="The number of micro-batches in a step.")]
_Changes = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="An argument of the model's constructor.")
]
_ActivationOffload = Annotated[
    bool, typer.Option("--activation-offload", help="Keep activations in host memory until backward.")
]
_Nvme = Annotated[
    Path | None, typer.Option(help="A folder on a disk for state; this includes the names that end in _nvme.")
]
_Disk = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Space on the disk for state.", show_default="the free space of --nvme, or none"),
]
_DiskRate = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Bytes that the disk reads or writes per second.", show_default="2GB"),
]


def _print_version(asked: bool) -> None:
    if asked:
        print(f"lightning-zero {__version__}")
        raise typer.Exit


@app.callback()
def _verbs(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """ZeRO data parallelism and offloading for PyTorch Lightning.

    Exit codes: 0 after success, 1 after an error or if doctor finds something
    that does not work, 2 for wrong arguments, 130 after Ctrl-C. Errors go to
    stderr; with --json, stdout has one object or nothing.
    """


@app.command("doctor", rich_help_panel=_BEFORE)
def _doctor(
    nvme: Annotated[Path | None, typer.Option(metavar="PATH", help="A folder on a disk to measure, too.")] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure rates, and store them for estimate --gpu this and zero_auto.")
    ] = False,
    params: Annotated[
        float | None,
        typer.Option(min=1, max=1e18, help="With --nvme: print the time of a step for this many parameters (7e9)."),
    ] = None,
    as_json: _Json = False,
) -> None:
    """Check that the installed package works on this machine.

    It compares every CPU kernel on every instruction set with torch, and
    reports threads, memory limits, versions and GPUs. The exit code is 1 if
    something does not work, and 0 if there is only advice. --measure takes
    some seconds, starts two processes for a moment, and writes the rates to
    lightning_zero/calibration.json in the user's cache (XDG_CACHE_HOME).
    """
    if params is not None and nvme is None:
        raise typer.BadParameter("it needs --nvme", param_hint="--params")
    from lightning_zero.cli.doctor import run

    raise typer.Exit(run(nvme=nvme, params=params, measure=measure, as_json=as_json))


@app.command("estimate", rich_help_panel=_BEFORE)
def _estimate(
    model: _Model = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML or JSON file with the constructor's arguments; _target_ names the class.")
    ] = None,
    changes: _Changes = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            metavar="FORM",
            help="A tensor of the batch, such as long:BxT or float:Bx3x224x224; B is --batch, T is --seq.",
        ),
    ] = None,
    hf: _Hf = None,
    params: _Params = None,
    layers: _Layers = None,
    hidden: _Hidden = None,
    vocabulary: Annotated[int, typer.Option("--vocab", min=1, help="The size of the vocabulary.")] = 50257,
    batch: Annotated[int, typer.Option(min=1, help="The number of examples in a rank's micro-batch.")] = 1,
    sequence: Annotated[
        int | None,
        typer.Option("--seq", min=1, help="The number of tokens in an example.", show_default="the model's, or 2048"),
    ] = None,
    accumulate: _Accumulate = 1,
    precision: Annotated[_Precision, typer.Option(help="The Trainer's precision flag.")] = _Precision.bf16,
    recompute: Annotated[
        bool, typer.Option("--checkpointing", help="Recompute layers in backward, with --hf and --params.")
    ] = False,
    activation_offload: _ActivationOffload = False,
    gpu: Annotated[
        str,
        typer.Option(
            help="A GPU, such as 4090, a100-40 or h100, or the size of its memory, such as 24GB. this: the GPUs of "
            "this machine, or its processors, with the rates that doctor --measure has measured."
        ),
    ] = "24GB",
    gpus: Annotated[int, typer.Option(min=1, help="The number of GPUs, or ranks, of a machine.")] = 1,
    nodes: Annotated[int, typer.Option(min=1, help="The number of machines.")] = 1,
    host: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Host memory of a machine that training may use.", show_default="64GB"),
    ] = None,
    dram: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Bytes that the host memory moves per second.", show_default="57.6GB"),
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Bytes that a machine sends per second.", show_default="12.5GB"),
    ] = None,
    nvme: _Nvme = None,
    disk: _Disk = None,
    disk_rate: _DiskRate = None,
    as_json: _Json = False,
) -> None:
    """Tell which strategies fit a model on a machine, and which is the fastest.

    The model is given as a class (--model), as a model of transformers (--hf)
    or by its size (--params). Nothing of its size is allocated: activations
    come from a run without values. Times are lower bounds, from rates that
    vendors state or that doctor --measure has measured.
    """
    from lightning_zero.cli.estimate import run
    from lightning_zero.cli.request import Request

    request = Request(
        model=model,
        config=config,
        changes=changes or [],
        hf=hf,
        params=params,
        layers=layers,
        hidden=hidden,
        vocabulary=vocabulary,
        inputs=inputs or [],
        batch=batch,
        sequence=sequence,
        accumulate=accumulate,
        precision=precision.value,
        recompute=recompute,
        activation_offload=activation_offload,
        gpu=gpu,
        gpus=gpus,
        nodes=nodes,
        host=host,
        dram=dram,
        network=network,
        nvme=nvme,
        disk=disk,
        disk_rate=disk_rate,
    )
    raise typer.Exit(run(request, as_json=as_json))


@app.command("config", rich_help_panel=_BEFORE)
def _config(
    model: _Model = None,
    config: Annotated[Path | None, typer.Option(help="YAML or JSON file with the constructor's arguments.")] = None,
    changes: _Changes = None,
    inputs: Annotated[
        list[str] | None, typer.Option("--input", metavar="FORM", help="A tensor of the batch, such as long:BxT.")
    ] = None,
    hf: _Hf = None,
    params: _Params = None,
    layers: _Layers = None,
    hidden: _Hidden = None,
    batch: Annotated[int | None, typer.Option(min=1, help="The number of examples in a rank's micro-batch.")] = None,
    sequence: Annotated[int | None, typer.Option("--seq", min=1, help="The number of tokens in an example.")] = None,
    accumulate: _Accumulate = 1,
    precision: Annotated[_Precision | None, typer.Option(help="The Trainer's precision flag.")] = None,
    recompute: Annotated[
        bool | None, typer.Option("--checkpointing/--no-checkpointing", help="Recompute layers in backward.")
    ] = None,
    activation_offload: _ActivationOffload = False,
    gpu: Annotated[
        str | None, typer.Option(help="A GPU, such as 4090, the size of its memory, such as 24GB, or this.")
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="The number of GPUs of a machine.")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="The number of machines.")] = None,
    host: Annotated[str | None, typer.Option(metavar="SIZE", help="Host memory of a machine for training.")] = None,
    nvme: _Nvme = None,
    disk: _Disk = None,
    disk_rate: _DiskRate = None,
    strategy: Annotated[str | None, typer.Option(metavar="NAME", help="A strategy instead of the fastest.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="The file to write.")] = None,
    python: Annotated[bool, typer.Option("--python", help="Print lines of Python, and write no file.")] = False,
    experiment: Annotated[
        bool, typer.Option("--experiment", help="Write a file for an application's group `experiment`.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")] = False,
    as_json: _Json = False,
) -> None:
    """Ask for a model and a machine, and write a configuration that fits.

    In a terminal it asks questions, with defaults from this machine. Choose with
    the arrow keys; flags answer questions in advance. Then it shows the table of
    estimate, and writes the strategy that you choose among those that fit.
    Without a terminal flags and defaults answer, and it takes the fastest.
    """
    if python:
        for flag, value in (("--out", out), ("--experiment", experiment), ("--overwrite", overwrite)):
            if value:
                raise typer.BadParameter("--python writes no file", param_hint=flag)
    from lightning_zero.cli.config import run

    form = "python" if python else "hydra" if out or experiment else None
    given = {
        "--model": model,
        "--config": config,
        "--input": " ".join(inputs) if inputs else None,
        "--hf": hf,
        "--params": params,
        "--layers": layers,
        "--hidden": hidden,
        "--batch": batch,
        "--seq": sequence,
        "--precision": precision.value if precision else None,
        "--checkpointing": recompute,
        "--gpu": gpu,
        "--gpus": gpus,
        "--nodes": nodes,
        "--host": host,
        "--nvme": nvme,
        "--strategy": strategy,
        "--out": out,
        "--python": form,
    }
    fixed = {
        "changes": changes or [],
        "accumulate": accumulate,
        "activation_offload": activation_offload,
        "disk": disk,
        "disk_rate": disk_rate,
    }
    raise typer.Exit(run(given, fixed, experiment=experiment, overwrite=overwrite, as_json=as_json))


@app.command("import-deepspeed", rich_help_panel=_BEFORE)
def _import_deepspeed(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="A ds_config.json.", show_default=False)],
    out: Annotated[
        Path | None,
        typer.Argument(
            metavar="[OUT]", help="The file to write.", show_default="FILE's name with .yaml, in this folder"
        ),
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(min=1, help="The number of ranks of a machine, which share the batch.", show_default=False),
    ] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="The number of machines.", show_default=False)] = None,
    experiment: Annotated[
        bool, typer.Option("--experiment", help="Write a file for an application's group `experiment`.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Write nothing if a key is unknown or not supported; exit code 1.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the table and write nothing.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT.")] = False,
    as_json: _Json = False,
) -> None:
    """Turn a DeepSpeed configuration into a Hydra configuration.

    It prints a result for every key: taken over, under the same or another name;
    no meaning here, with the reason; not supported, with what to do instead;
    unknown, with the most similar name. A file that is not JSON, has a value of a
    wrong type or contradicts itself is an error with line and column.
    """
    from lightning_zero.cli.import_deepspeed import run

    code = run(
        path,
        out,
        devices=devices,
        nodes=nodes,
        experiment=experiment,
        strict=strict,
        dry_run=dry_run,
        overwrite=overwrite,
        as_json=as_json,
    )
    raise typer.Exit(code)


@app.command("inspect", rich_help_panel=_CHECKPOINTS)
def _inspect(
    path: _Checkpoint,
    as_json: _Json = False,
) -> None:
    """Show the contents of a checkpoint.

    It lists tensors, optimizer state, parameter groups, the step, and the number
    of ranks that wrote the checkpoint. It reads no tensor, runs no code of the
    file, and needs none of the classes with which it was written.
    """
    from lightning_zero.cli.inspect import run

    raise typer.Exit(run(path, as_json=as_json))


@app.command("export", rich_help_panel=_CHECKPOINTS)
def _export(
    path: _Checkpoint,
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="The folder to write the files to.", show_default=False)
    ],
    layout: Annotated[
        _Format,
        typer.Option("--format", help="hf: safetensors with the config.json that from_pretrained needs."),
    ] = _Format.safetensors,
    dtype: Annotated[
        _Dtype | None, typer.Option(help="The dtype of floating-point tensors.", show_default="as in the checkpoint")
    ] = None,
    strip_prefix: Annotated[
        str,
        typer.Option(
            metavar="PREFIX",
            help="A prefix to strip, such as model.; names without it are left out. auto: the common prefix.",
            show_default=False,
        ),
    ] = "",
    max_shard_size: Annotated[
        str, typer.Option(metavar="SIZE", help="The largest size of a file, such as 5GB or 512MiB.")
    ] = "5GB",
    config: Annotated[
        Path | None,
        typer.Option(
            help="For hf: the model's config.json or its folder.", show_default="config of the hyperparameters"
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the weights in DIR; other files stay.")] = (
        False
    ),
    as_json: _Json = False,
) -> None:
    """Write the weights of a checkpoint as safetensors.

    Tensors are written one by one, so that it needs memory for the largest one
    only. They are compared with the checkpoint bit by bit before the files get
    their names. Tied weights are stored once.
    """
    from lightning_zero.cli.export import run

    code = run(
        path,
        directory,
        layout.value,
        dtype=dtype,
        strip_prefix=strip_prefix,
        max_shard_size=max_shard_size,
        config=config,
        overwrite=overwrite,
        as_json=as_json,
    )
    raise typer.Exit(code)


@app.command("consolidate", rich_help_panel=_CHECKPOINTS)
def _consolidate(
    source: Annotated[
        Path,
        typer.Argument(metavar="CHECKPOINT", help="A sharded checkpoint, or one with 8-bit state.", show_default=False),
    ],
    path: Annotated[Path, typer.Argument(metavar="OUT", help="The file to write.", show_default=False)],
    dtype: Annotated[
        _Dtype | None, typer.Option(help="The dtype of floating-point weights.", show_default="as in the checkpoint")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT.")] = False,
    as_json: _Json = False,
) -> None:
    """Write a sharded checkpoint, this package's or FSDP's, into one ordinary file, for any strategy.

    8-bit optimizer state in compact form is decoded to fp32 exactly, also that
    of a file. All checksums are compared first. It needs a few MiB of memory at
    a time.
    """
    from lightning_zero.cli.consolidate import run

    raise typer.Exit(run(source, path, dtype=dtype, overwrite=overwrite, as_json=as_json))


@app.command("convert-deepspeed", rich_help_panel=_CHECKPOINTS)
def _convert_deepspeed(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="A folder that DeepSpeed wrote, such as last.ckpt/.", show_default=False),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The checkpoint file.", show_default=False)],
    trust: Annotated[
        bool,
        typer.Option(
            "--trust", help="Read the folder's pickles, which can run any program. Use it only if you trust the author."
        ),
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT.")] = False,
    as_json: _Json = False,
) -> None:
    """Turn a ZeRO folder of DeepSpeed (stage 1, 2 or 3) into one checkpoint file.

    The file has fp32 weights, optimizer state by parameter name, the loss scale
    and Lightning's own entries. This works on any machine: it needs little more
    memory than for a piece of a tensor, and no DeepSpeed.
    """
    from lightning_zero.cli.convert_deepspeed import run

    raise typer.Exit(run(folder, out, trust=trust, overwrite=overwrite, as_json=as_json))


def main() -> None:
    """Runs the command line of this process."""
    app()
