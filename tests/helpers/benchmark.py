"""Imports and runs modules of the folder `benchmarks`, which is not installed."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
import os
import runpy
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .pages import ROOT
from .ranks import RankPool

PACKAGE = "benchmarks"


def load(name: str) -> Any:
    """Imports the benchmark ``name`` without changing ``sys.path``.

    The folder of tests, which is on the path, contains a folder ``benchmarks`` too. An ordinary import could find that
    one and register it as a namespace package.
    """
    if PACKAGE not in sys.modules:
        spec = importlib.util.spec_from_file_location(PACKAGE, ROOT / PACKAGE / "__init__.py")
        assert spec is not None
        assert spec.loader is not None
        package = importlib.util.module_from_spec(spec)
        sys.modules[PACKAGE] = package
        spec.loader.exec_module(package)
    return importlib.import_module(f"{PACKAGE}.{name}")


def run_main(name: str, folder: str, *arguments: str) -> None:
    """Runs a benchmark's main function with these arguments in a folder, in a new rank that is its process."""
    os.chdir(folder)
    sys.argv = [name, *arguments]
    load(name).main()


def run_script(path: str, job: dict[str, Any], variables: Mapping[str, str]) -> None:
    """Runs the script of a benchmark's ranks in a new rank, as `contest.run_ranks` starts it."""
    os.chdir(job["folder"])
    run_printing([path, json.dumps(job)], variables)


def run_printing(arguments: list[str], variables: Mapping[str, str]) -> str:
    """Runs a script with its arguments in a new rank that is its process, and returns what it prints."""
    os.environ.update(variables)
    sys.argv = arguments
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(arguments[0], run_name="__main__")
    return printed.getvalue()


def forking(new_ranks: Callable[[int], RankPool], own: Callable[..., Any], *processes: str) -> Callable[..., Any]:
    """In the place of `contest.run_ranks`: forks ranks, which need not import torch and Lightning again.

    Args:
        new_ranks: the fixture.
        own: the function that is replaced.
        processes: names of contestants for which it is called all the same.
    """

    def run_ranks(contestant: Any, script: Path, job: Any, ranks: int, variables: Any, *rest: Any) -> Any:
        if contestant.name in processes:
            return own(contestant, script, job, ranks, variables, *rest)
        variables = {key: str(value) for key, value in variables.items()} | {"OMP_NUM_THREADS": "1"}
        pool = new_ranks(ranks)
        pool.run(run_script, str(script), dict(job), variables)
        pool.close()
        return [json.loads(Path(job["folder"], f"rank{rank}.json").read_text()) for rank in range(ranks)]

    return run_ranks
