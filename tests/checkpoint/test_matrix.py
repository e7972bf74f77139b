"""Written by any strategy on any number of ranks, resumed by any other: the next five steps are the same."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from checkpoint.resuming import Global, run
from helpers.ranks import RankPool
from strategy.fits import Fitted, Recipe, assert_close, assert_same, assert_same_states
from torch import Tensor

from lightning_zero import DynamicLossScaler, ZeroPrecision

# Epochs of three steps; the learning rate halves in every step that is not skipped.
RECIPE = Recipe(steps=3, dtype=torch.float64, scheduled=True, options={"lr": 0.05})
SAVED, STEPS = 2, 7
OVERFLOWS = (1, 4)  # numbers of steps: only who remembers the first one lowers the scale at the second


class Place(NamedTuple):
    """Where a run is."""

    name: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.name} on {self.ranks}"


NAMES = ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
SIZES = (1, 2, 4)
PLACES = [Place(name, ranks) for name in NAMES for ranks in SIZES]
# Who reads what of whom: every place writes and reads, from any number of ranks to any other.
SAMPLE = {
    Place(NAMES[n], SIZES[s]): [Place(NAMES[(n + 2 * s + 1) % 6], SIZES[(n + s) % 3])]
    for n in range(6)
    for s in range(3)
}
SAMPLE[Place("zero3", 2)].append(Place("zero3", 2))
SAMPLE[Place("zero2_offload", 1)].append(Place("zero3_offload", 1))


class Traced(Global):
    """Overflows in some steps; notes after each the loss scale, the skipped steps, the rates and this rank's batch."""

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.batch = batch
        loss = super().training_step(batch, index)
        assert loss is not None
        if self.trainer.global_step in OVERFLOWS and dist.get_rank() == dist.get_world_size() - 1:
            loss = loss + (self.model.norm.weight * math.inf).sum()
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        strategy = self.trainer.strategy
        rates = [group["lr"] for group in self.trainer.optimizers[0].param_groups]
        self.notes.append(((strategy.loss_scale, strategy.skipped_steps, rates), self.batch.tolist()))


def run_each(name: str, options: list[dict[str, Any]]) -> list[Fitted]:
    """A run of the strategy for each of the options of `resuming.run`."""
    scaler = {"init_scale": 2.0**10, "window": 3, "hysteresis": 2}
    fits = []
    for each in options:
        recipe = dataclasses.replace(RECIPE, seed=7 if "resume" in each else 0)
        plugin = ZeroPrecision("64-true", scaler=DynamicLossScaler(**scaler))  # type: ignore[arg-type]
        fits.append(run(name, recipe, Traced, steps=STEPS, plugins=[plugin], **each))
    return fits


def trace_of(ranks: list[Fitted]) -> list[Any]:
    """What happened step by step, with the whole batches."""
    traces = []
    for notes in zip(*(fitted.notes for fitted in ranks), strict=True):
        state, *others = (state for state, _ in notes)
        assert all(other == state for other in others)
        traces.append((state, list(itertools.chain.from_iterable(batch for _, batch in notes))))
    return traces


class Written(NamedTuple):
    """A file, who wrote it, and the run that it was written in, by rank."""

    path: str
    place: Place
    whole: list[Fitted]


Writer = Callable[[Place], Written]


@pytest.fixture(scope="module")
def write(rank_pools: Callable[[int], RankPool], tmp_path_factory: pytest.TempPathFactory) -> Writer:
    """Makes the file of a place, once."""
    folder = tmp_path_factory.mktemp("matrix")
    made: dict[Place, Written] = {}

    def write(place: Place) -> Written:
        if place not in made:
            path = str(folder / f"{place}.ckpt")
            fits = rank_pools(place.ranks).run(run_each, place.name, [{"save": (SAVED, path)}])
            made[place] = Written(path, place, [fitted for (fitted,) in fits])
        return made[place]

    return write


# Few enough for the fast tests, from and to every number of ranks.
FAST = (Place("zero3", 2), Place("zero1", 4), Place("zero3_offload", 1))


@pytest.mark.parametrize(
    "reader", [place if place in FAST else pytest.param(place, marks=pytest.mark.slow) for place in PLACES], ids=str
)
def test_a_file_of_another_place_resumes(rank_pools: Any, reader: Place, write: Writer) -> None:
    pool, files = rank_pools(reader.ranks), [write(writer) for writer in SAMPLE[reader]]
    by_rank = pool.run_within(240, run_each, reader.name, [{"resume": file.path} for file in files])
    for (_, writer, whole), resumed in zip(files, zip(*by_rank, strict=True), strict=True):
        assert trace_of(list(resumed)) == trace_of(whole)[SAVED:], writer
        assert_same_ends(resumed[0], whole[0], bitwise=writer.ranks == reader.ranks)


def assert_same_ends(resumed: Fitted, whole: Fitted, *, bitwise: bool) -> None:
    """Sums over as many ranks have one order."""
    assert (resumed.steps, resumed.epochs) == (whole.steps, whole.epochs)
    ours, theirs = resumed.optimizer_states[0], whole.optimizer_states[0]
    if bitwise:
        assert_same(resumed.weights, whole.weights)
        assert_same_states(ours, theirs)
        return
    assert_close(resumed.weights, whole.weights)
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        assert_close(ours[name], values)


def test_the_sample_has_every_place() -> None:
    assert sum(map(len, SAMPLE.values())) == 20
    assert {writer for writers in SAMPLE.values() for writer in writers} == set(SAMPLE) == set(PLACES)
    crossings = {(writer.ranks, reader.ranks) for reader, writers in SAMPLE.items() for writer in writers}
    assert crossings == set(itertools.product(SIZES, SIZES))


def test_the_trace_shows_what_it_should(write: Writer) -> None:
    states = [state for state, _ in trace_of(write(Place("zero0", 1)).whole)]
    assert [scale for scale, _, _ in states] == [2.0**10] * 4 + [2.0**9] * 3
    assert [skipped for _, skipped, _ in states] == [0, 1, 1, 1, 2, 2, 2]
    assert [rates[0] / 0.05 for _, _, rates in states] == [2.0**-n for n in (1, 1, 2, 3, 3, 4, 5)]
