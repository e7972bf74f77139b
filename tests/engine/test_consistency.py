"""Ranks that do not do the same get an error that says so, and no wrong number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine import driver
from engine.driver import Setup
from helpers import models
from helpers.ranks import RankError, RankPool, ranks
from torch import Tensor, nn

from lightning_zero import CollectiveError
from lightning_zero.sharding import Mesh

TIMEOUT = 5.0  # seconds in which ranks come to a collective that go the same way
LIMIT = 60.0  # of a run: it is over long before torch's own timeout of half an hour


class Branching(nn.Module):
    """Blocks of one size or of several; the last rank goes another way when it is told."""

    def __init__(self, sizes: tuple[int, int, int], way: str) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, n), nn.Tanh(), nn.Linear(n, 4)) for n in sizes)
        self.way = way
        self.astray = False

    def forward(self, x: Tensor) -> Tensor:
        order = [0, 1, 2]
        if self.astray and dist.get_rank() == dist.get_world_size() - 1:
            order = {"other": [0, 2, 1], "fewer": [0, 2], "more": [0, 1, 1, 2]}[self.way]
        x = self.first(x)
        for number in order:
            x = self.blocks[number](x)
        return x


def go_astray(
    way: str, sizes: tuple[int, int, int], step: int, check_steps: int, stage: int = 3, *, cma: str = ""
) -> None:
    setup = Setup(stage, check_steps=check_steps)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIGHTNING_ZERO_CMA", cma)
        mesh = Mesh.create()
    session = driver.start(Branching(sizes, way), lambda m: torch.optim.SGD(m.parameters(), lr=0.1), setup, mesh)
    for number in range(step + 1):
        session.model.astray = number == step
        if session.model.astray and not mesh.shard.checked:
            driver.limit_waits(mesh, TIMEOUT)
        driver.run_step(session, [torch.ones(2, 4)], lambda model, x: model(x).sum())


def failures_of(pool: RankPool, function: Any, *args: Any, **kwargs: Any) -> list[str]:
    with pytest.raises(RankError) as caught:
        pool.run_within(LIMIT, function, *args, **kwargs)
    failures = caught.value.failures
    assert set(failures) == set(range(pool.world_size))
    assert {failure.kind for failure in failures.values()} == {"CollectiveError"}
    return [failures[rank].message for rank in range(pool.world_size)]


SAME, DIFFERENT = (3, 3, 3), (3, 5, 7)


@pytest.mark.parametrize(
    ("pool", "way", "sizes"),
    [(2, "other", SAME), (2, "fewer", DIFFERENT), pytest.param(4, "more", SAME, marks=pytest.mark.slow)],
    indirect=["pool"],
)
def test_another_way_in_a_checked_step_is_an_error_at_once(
    pool: RankPool, way: str, sizes: tuple[int, int, int]
) -> None:
    messages = failures_of(pool, go_astray, way, sizes, 1, 2)
    assert len(set(messages)) == 1
    others, last = range(pool.world_size - 1), pool.world_size - 1
    named = f"rank{'s' * (len(others) > 1)} {', '.join(map(str, others))}: "
    assert named in messages[0]
    assert f"rank {last}: " in messages[0]
    assert "blocks." in messages[0]
    assert "gathered_parameters" in messages[0]


@pytest.mark.slow
@ranks(2)
@pytest.mark.parametrize(
    ("way", "sizes", "cma"),
    [("other", SAME, "off"), ("fewer", DIFFERENT, "off"), ("more", DIFFERENT, "off"), ("other", SAME, "")],
)
def test_later_it_is_an_error_after_the_timeout(
    pool: RankPool, way: str, sizes: tuple[int, int, int], cma: str
) -> None:
    """Between ranks that send their messages; between those that read them, at the latest then."""
    for rank, message in enumerate(failures_of(pool, go_astray, way, sizes, 3, 1, cma=cma)):
        assert message.startswith(f"rank {rank} of {pool.world_size} could not ")
        assert "blocks." in message


def disagree_in_a_shard_group() -> str:
    """Of two shard groups of two ranks, those of the second disagree."""
    mesh = Mesh.create(2)
    mesh.check(True)
    try:
        mesh.shard.all_gather_(torch.zeros(2), "gather" if dist.get_rank() < 3 else "scatter")
    except CollectiveError as error:
        return str(error)
    return ""


def test_ranks_of_a_group_are_named_by_their_numbers_in_the_world(pool4: RankPool) -> None:
    *others, third, last = pool4.run(disagree_in_a_shard_group)
    assert others == ["", ""]
    assert third == last
    assert "rank 2: gather; rank 3: scatter" in third


def steps_unevenly(stage: int, check_steps: int) -> None:
    """The last rank makes one backward pass more than the others."""
    mesh = Mesh.create()
    setup = Setup(stage, check_steps=check_steps)
    session = driver.start(models.MLP(), models.optimizer_factory("sgd"), setup, mesh)
    micro = [torch.ones(2, 6, dtype=torch.long)]
    for _ in range(2):
        driver.run_step(session, micro)
    if not mesh.shard.checked:
        driver.limit_waits(mesh, TIMEOUT)
    if dist.get_rank() == dist.get_world_size() - 1:
        driver.backward(session.engine, models.next_token_loss(session.model, micro[0]))
    driver.run_step(session, micro)
    driver.run_step(session, micro)


@ranks(2)
@pytest.mark.parametrize(
    ("check_steps", "stage"),
    [(10, 3), pytest.param(10, 1, marks=pytest.mark.slow), pytest.param(0, 2, marks=pytest.mark.slow)],
)
def test_a_backward_that_only_one_rank_makes(pool: RankPool, stage: int, check_steps: int) -> None:
    messages = failures_of(pool, steps_unevenly, stage, check_steps)
    what = "gather " if stage == 3 else "reduce the gradients of "
    assert all(f"{what}(root)" in message for message in messages)


def differ_silently() -> None:
    """As on a backend without tags: two collectives of one size are mixed up, and only the digests know."""
    mesh = Mesh.create()
    session = driver.start(models.MLP(), models.optimizer_factory("sgd"), Setup(2), mesh)
    if dist.get_rank() == 1:
        mesh.shard.digest += 1
        mesh.shard.recent.append("gather something else")
    new = mesh.shard._new_exchange

    def untagged(outgoing: Any, incoming: Any, tag: int, channel: Any = None) -> Any:
        return new(outgoing, incoming, 7, channel)

    mesh.shard._new_exchange = untagged  # type: ignore[method-assign]
    driver.run_step(session, [torch.ones(2, 6, dtype=torch.long)])


def test_digests_find_collectives_that_were_mixed_up(pool2: RankPool) -> None:
    messages = failures_of(pool2, differ_silently)
    assert len(set(messages)) == 1
    assert "gather something else" in messages[0]


def check_counts(steps: int) -> list[bool]:
    mesh = Mesh.create()
    session = driver.start(models.MLP(), models.optimizer_factory("sgd"), Setup(3, check_steps=steps), mesh)
    checked = []
    for _ in range(3):
        checked.append(mesh.shard.checked)
        driver.run_step(session, [torch.ones(2, 6, dtype=torch.long)])
    return checked


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_only_the_first_steps_are_checked(pool2: RankPool, steps: int) -> None:
    assert pool2.run(check_counts, steps) == [[n < steps for n in range(3)]] * 2


def check_evaluation(steps: int) -> list[bool]:
    mesh = Mesh.create()
    session = driver.start(
        Branching(SAME, "other"), lambda m: torch.optim.SGD(m.parameters()), Setup(3, check_steps=steps), mesh
    )
    checked = []
    for _ in range(3):
        checked.append(mesh.shard.checked)
        with torch.no_grad(), session.engine.forward_context():
            session.model(torch.ones(2, 4))
    return checked


def test_evaluation_counts_as_well(pool2: RankPool) -> None:
    assert pool2.run(check_evaluation, 2) == [[True, True, False]] * 2


def build_differently(what: str) -> None:
    last = dist.get_rank() == dist.get_world_size() - 1
    width = 5 if last and what == "shape" else 4
    model = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 2, bias=not (last and what == "missing")))
    if last and what == "dtype":
        model.double()
    if what == "optimized":
        model[0].requires_grad_(not last)
    driver.make_engine(model, Setup(2))


@pytest.mark.parametrize(
    ("pool", "what", "name"),
    [(2, "shape", "0.weight"), (4, "missing", "1.bias"), (2, "dtype", "0.weight"), (2, "optimized", "0.weight")],
    indirect=["pool"],
)
def test_ranks_with_different_modules(pool: RankPool, what: str, name: str) -> None:
    messages = failures_of(pool, build_differently, what)
    assert len(set(messages)) == 1
    assert f"the ranks hold different modules: parameter {name!r} is " in messages[0]
    assert f"on rank {pool.world_size - 1}" in messages[0]


def replicas_differ() -> None:
    """Ranks 0 and 1 share a shard group, 2 and 3 another; the second goes another way as a whole."""
    mesh = Mesh.create(2)
    setup = Setup(3, check_steps=0, shard_size=2)
    session = driver.start(Branching(SAME, "other"), lambda m: torch.optim.SGD(m.parameters(), lr=0.1), setup, mesh)
    for block in session.model.blocks[1:] if mesh.world.rank >= 2 else ():
        block(torch.ones(1, 4))
    driver.run_step(session, [torch.ones(2, 4)], lambda model, x: model(x).sum())


def test_shard_groups_may_go_different_ways_as_long_as_replicas_agree(pool4: RankPool) -> None:
    pool4.run_within(LIMIT, replicas_differ)
