"""The command `lightning-zero`.

Every verb has a module of its own, imported when the verb runs: help needs neither torch nor what the others need.
"""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["app", "main"]

app = typer.Typer(
    name="lightning-zero", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=None
)


@app.callback()
def _verbs() -> None:
    """ZeRO data parallelism and offloading for PyTorch Lightning."""


@app.command("doctor")
def _doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Check that the installed package works on this machine.

    Runs every CPU kernel on every instruction set against torch, and reports threads, memory limits, versions and GPUs.
    The exit code is 1 when something does not work; advice alone leaves it 0.
    """
    from lightning_zero.cli.doctor import run

    raise typer.Exit(run(as_json=as_json))


def main() -> None:
    """Run the command line of this process."""
    app()
