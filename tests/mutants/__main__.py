"""`python -m mutants [ID ...]` plants mutants and runs the tests that must notice; `generate` proposes new ones."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mutants import catalogue, generate, runner
from mutants.catalogue import Mutant
from mutants.runner import Job, Outcome, Project

HERE = Path(__file__).resolve().parent
PRELOAD = "numpy,torch,torch.distributed,pytest,hypothesis,xdist,hydra,lightning.pytorch"
LAST_LINES = 40


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    project = Project(options.package, options.root.resolve(), tuple(options.preload.split(",")))
    if options.ids[:1] == ["generate"]:
        for path in options.ids[1:]:
            for mutant in generate.propose(project.folder, path, seed=options.seed, count=options.count):
                print(mutant.toml())
        return 0
    mutants = catalogue.read(options.catalogue)
    if not options.tests:
        catalogue.check(mutants, project.folder, project.root)
    chosen = choose(mutants, options.ids)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        return test(project, chosen, Path(folder), options)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m mutants", description=__doc__)
    parser.add_argument("ids", nargs="*", help="mutants to plant (all), or `generate FILE ...`: files of the package")
    parser.add_argument("--jobs", type=int, default=2, help="mutants side by side (2)")
    parser.add_argument("--limit", type=float, default=300.0, help="time limit of a mutant's tests, in seconds")
    parser.add_argument("--tests", help="pytest's arguments instead of the named tests, to find what kills a mutant")
    parser.add_argument("--all", action="store_true", help="continue after the first failure and print all failures")
    parser.add_argument("--seed", type=int, default=0, help="for `generate`: seed of the choice of mutants")
    parser.add_argument("--count", type=int, default=2, help="for `generate`: number of mutants per file")
    parser.add_argument("--catalogue", type=Path, default=HERE, help="the folder with the lists")
    parser.add_argument("--package", default="lightning_zero")
    parser.add_argument("--root", type=Path, default=HERE.parents[1], help="what node ids begin at")
    parser.add_argument("--preload", default=PRELOAD, help="modules to import once for all")
    return parser.parse_args(arguments)


def choose(mutants: Sequence[Mutant], ids: Sequence[str]) -> list[Mutant]:
    by_id = {mutant.id: mutant for mutant in mutants}
    if unknown := [name for name in ids if name not in by_id]:
        raise SystemExit(f"no mutants {', '.join(unknown)}; there are {', '.join(by_id)}")
    return [by_id[name] for name in ids] if ids else list(mutants)


def test(project: Project, mutants: Sequence[Mutant], folder: Path, options: argparse.Namespace) -> int:
    """Run the tests on the unchanged package, then on each mutant; 1 if a test fails on the former or one survives."""
    nodes = tuple(dict.fromkeys(node for mutant in mutants for node in mutant.killed_by))
    if not options.tests and not passes(project, nodes, folder / "unchanged", options):
        return 1
    stop = () if options.all else ("--exitfirst",)
    tests = tuple(shlex.split(options.tests or ""))
    jobs = [Job((*stop, *(tests or mutant.killed_by)), mutant) for mutant in mutants]
    survivors = []
    for outcome in runner.run(project, jobs, folder, side_by_side=options.jobs, limit=options.limit):
        assert outcome.job.mutant is not None
        print(f"{outcome.job.mutant.id:<44} {describe(outcome):<100} {outcome.seconds:4.0f} s", flush=True)
        if not outcome.killed:
            survivors.append(outcome.job.mutant.id)
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} killed{': ' if survivors else ''}{', '.join(survivors)}")
    return 1 if survivors else 0


def passes(project: Project, nodes: Sequence[str], folder: Path, options: argparse.Namespace) -> bool:
    """Whether the tests pass on a copy without a mutant; otherwise their failures would mean nothing."""
    files = list(dict.fromkeys(map(file_of, nodes)))
    parts = [[node for node in nodes if file_of(node) in files[part :: options.jobs]] for part in range(options.jobs)]
    jobs = [Job(tuple(part)) for part in parts if part]
    outcomes = list(runner.run(project, jobs, folder, side_by_side=options.jobs, limit=10 * options.limit))
    seconds = max((outcome.seconds for outcome in outcomes), default=0.0)
    print(
        f"{len(nodes)} tests of the package as it is: {', '.join(map(describe, outcomes))}, {seconds:.0f} s", flush=True
    )
    for outcome in outcomes:
        if not outcome.passed:
            print(outcome.output)
    return all(outcome.passed for outcome in outcomes)


def file_of(node: str) -> str:
    return node.partition("::")[0]


def describe(outcome: Outcome) -> str:
    if outcome.status is None:
        return "time limit"
    if outcome.failed:
        return ", ".join(f"{node} ({seconds:.1f} s)" for node, seconds in outcome.failed.items())
    if outcome.passed:
        return "SURVIVED" if outcome.job.mutant else "passed"
    return "SURVIVED: the tests could not run\n" + "\n".join(outcome.output.splitlines()[-LAST_LINES:])


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends running jobs, as an interrupt does
    sys.exit(main())
