"""The choice of a way to train: the fastest by the plan among those that fit, the same on all ranks.

Each rank says what every candidate takes of it (:func:`needs_of`). Of what all ranks have said the most counts
(:func:`most`), so that all of them choose the same by :func:`choose`, which depends on nothing else than its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Protocol

import torch

from lightning_zero.planning.account import Peak
from lightning_zero.planning.devices import USABLE, Machine
from lightning_zero.planning.estimate import Choice, Times, preference, times_of
from lightning_zero.planning.plan import Plan
from lightning_zero.planning.preflight import Claim, shortages, with_plan


@dataclass(frozen=True)
class Need:
    """A rank's share of what a way to train takes.

    Attributes:
        peak: bytes, of any step.
        disk: bytes that rest there.
        times: of a step, at least.
    """

    peak: Peak
    disk: int
    times: Times


class Room(Protocol):
    """The memory that there is for a training."""

    def lacks(self, need: Need) -> tuple[str, ...]:
        """Names what has less than ranks want that take ``need`` each; empty where all of it fits."""


@dataclass(frozen=True)
class GivenRoom:
    """The memory of the ranks of a run, from what they have told each other.

    Attributes:
        claims: of all ranks, with what each has in use.
        device: that trains.
        disk: bytes for a rank there.
        reserve: bytes that stay free on a rank's device for what is in no plan.
    """

    claims: Sequence[Claim]
    device: torch.device
    disk: int
    reserve: int = 0

    def lacks(self, need: Need) -> tuple[str, ...]:
        peak = need.peak
        wanted = Peak(peak.device + self.reserve, peak.host, peak.total + self.reserve, peak.pinned)
        short = [str(shortage) for shortage in shortages(with_plan(self.claims, wanted, self.device))]
        return (*short, *(["the disk"] if need.disk > self.disk else []))


@dataclass(frozen=True)
class ImaginedRoom:
    """The memory of machines that are not there.

    Attributes:
        machine: of which each has as much.
        disk: bytes for a rank on its disk.
    """

    machine: Machine
    disk: int = 0

    def lacks(self, need: Need) -> tuple[str, ...]:
        machine = self.machine
        short = {
            "device": need.peak.device > USABLE * machine.gpu.memory,
            "host": need.peak.host * machine.gpus > machine.host,
            "disk": need.disk > self.disk,
        }
        return tuple(name for name, is_short in short.items() if is_short)


def spared(claims: Sequence[Claim], share: float = USABLE) -> list[Claim]:
    """The claims with less in each pool: of what is not in use a share, the rest for libraries and fragmentation."""

    def less(claim: Claim) -> int:
        return claim.used + int(share * (claim.pool.total - claim.used)) - claim.pool.beside

    return [replace(claim, pool=replace(claim.pool, total=less(claim))) for claim in claims]


def needs_of(
    candidates: Sequence[Choice], plan_of: Callable[[Choice], Plan], flops: float, wide: bool, machine: Machine
) -> list[Need | None]:
    """Plans each candidate for this rank; None for one that its optimizers cannot be trained with.

    Args:
        candidates: ways to train.
        plan_of: the plan of one; it raises a ValueError for what cannot be.
        flops: of all micro-batches of a step of one rank; 0: nobody knows, and nothing is sent or copied beside them.
        wide: whether they are computed in fp32.
        machine: of the run.
    """
    found: list[Need | None] = []
    for candidate in candidates:
        try:
            plan = plan_of(candidate)
        except ValueError:
            found.append(None)
            continue
        times = times_of(plan, candidate.setting, flops, wide, machine)
        found.append(Need(plan.peak, plan.held.disk, times))
    return found


def most(ranks: Sequence[Sequence[Need | None]]) -> list[Need | None]:
    """The most that any rank needs of each, by candidate; None where one of them cannot be trained with it."""

    def of_all(needs: tuple[Need | None, ...]) -> Need | None:
        known = [need for need in needs if need is not None]
        if len(known) < len(needs):
            return None
        parts = [asdict(need.times) for need in known]
        times = Times(**{name: max(part[name] for part in parts) for name in parts[0]})
        peak = Peak(*(max(values) for values in zip(*(need.peak for need in known), strict=True)))
        return Need(peak, max(need.disk for need in known), times)

    return [of_all(needs) for needs in zip(*ranks, strict=True)]


@dataclass(frozen=True)
class Pick:
    """A candidate, and how it was chosen.

    Attributes:
        number: its place among the candidates.
        need: what it takes of a rank.
        lacks: what it lacks; empty where it fits.
        fitting: how many of the candidates fit.
        considered: how many there were.
    """

    number: int
    need: Need
    lacks: tuple[str, ...]
    fitting: int
    considered: int


def choose(candidates: Sequence[Choice], needs: Sequence[Need | None], room: Room) -> Pick:
    """Chooses the fastest candidate that fits; where none does, the one that takes the least memory.

    Of candidates whose steps take the same time within a hundredth, the first is chosen.

    Args:
        candidates: the simplest first.
        needs: of each.
        room: that there is.

    Raises:
        ValueError: there is no candidate, or none with which these optimizers can train.
    """
    known = [(number, need, room.lacks(need)) for number, need in enumerate(needs) if need is not None]
    if not known:
        raise ValueError("none of the ways to train goes with these optimizers")

    def key(one: tuple[int, Need, tuple[str, ...]]) -> tuple[bool, bool, float]:
        number, need, lacks = one
        return preference(not lacks, candidates[number].reduced, need.times.bound, need.peak.total)

    number, need, lacks = min(known, key=key)
    return Pick(number, need, lacks, sum(not lacks for *_, lacks in known), len(known))
