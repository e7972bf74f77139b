"""Chooses a way to train: the fastest by the plan among those that fit, the same on all ranks.

Each rank computes what every candidate needs of its memory, or why it cannot train (:func:`needs_of`). The ranks
exchange this, and the largest needs count (:func:`most`). All ranks then make the same choice by :func:`choose`, which
depends only on its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from lightning_zero.planning.account import Peak
from lightning_zero.planning.devices import USABLE, Machine
from lightning_zero.planning.estimate import Choice, Times, preference, times_of
from lightning_zero.planning.plan import Plan
from lightning_zero.planning.preflight import Claim, shortages, with_plan


@dataclass(frozen=True)
class Need:
    """The memory and time that a way to train needs on one rank.

    Attributes:
        peak: the peak of any step, in bytes.
        disk: bytes on a disk.
        times: the least times of a step.
    """

    peak: Peak
    disk: int
    times: Times


@dataclass(frozen=True)
class Room:
    """The memory of the ranks of a run, as they have told each other.

    Attributes:
        claims: claims of all ranks, with the memory that each has in use.
        device: the training device.
        disk: bytes on the disk for each rank.
        reserve: bytes to leave free on each rank's device, for memory that a plan does not include.
    """

    claims: Sequence[Claim]
    device: torch.device
    disk: int
    reserve: int = 0

    def lacks(self, need: Need) -> tuple[str, ...]:
        """Names the memories that are too small if each rank takes ``need``; empty if everything fits."""
        peak = need.peak
        wanted = Peak(peak.device + self.reserve, peak.host, peak.total + self.reserve, peak.pinned)
        short = [str(shortage) for shortage in shortages(with_plan(self.claims, wanted, self.device))]
        return (*short, *(["the disk"] if need.disk > self.disk else []))


def spared(claims: Sequence[Claim], share: float = USABLE) -> list[Claim]:
    """The claims with only a share of the free memory in each pool; the rest is for libraries and fragmentation."""

    def less(claim: Claim) -> int:
        return claim.used + int(share * (claim.pool.total - claim.used)) - claim.pool.beside

    return [replace(claim, pool=replace(claim.pool, total=less(claim))) for claim in claims]


def needs_of(
    candidates: Sequence[Choice], plan_of: Callable[[Choice], Plan], flops: float, wide: bool, machine: Machine
) -> list[Need | str]:
    """Plans each candidate for this rank; a candidate that cannot train has the reason instead of a need.

    Args:
        candidates: ways to train.
        plan_of: makes the plan of a candidate; raises a ValueError if the candidate cannot train.
        flops: operations of all micro-batches of a step of one rank; 0: unknown, so no sending or copying overlaps.
        wide: whether the model computes in fp32.
        machine: the machine of the run.
    """
    found: list[Need | str] = []
    for candidate in candidates:
        try:
            plan = plan_of(candidate)
        except ValueError as error:
            found.append(str(error))
            continue
        times = times_of(plan, candidate.setting, flops, wide, machine)
        found.append(Need(plan.peak, plan.held.disk, times))
    return found


def most(ranks: Sequence[Sequence[Need | str]]) -> list[Need | str]:
    """The largest need of any rank, by candidate; the first reason if some rank cannot train with the candidate."""

    def of_all(needs: tuple[Need | str, ...]) -> Need | str:
        reasons = [need for need in needs if isinstance(need, str)]
        if reasons:
            return reasons[0]
        known = [need for need in needs if isinstance(need, Need)]
        parts = [asdict(need.times) for need in known]
        times = Times(**{name: max(part[name] for part in parts) for name in parts[0]})
        peak = Peak(*(max(values) for values in zip(*(need.peak for need in known), strict=True)))
        return Need(peak, max(need.disk for need in known), times)

    return [of_all(needs) for needs in zip(*ranks, strict=True)]


@dataclass(frozen=True)
class Pick:
    """The chosen candidate, and the circumstances of the choice.

    Attributes:
        number: its index among the candidates.
        need: its need on a rank.
        lacks: the memories that are too small for it; empty if it fits.
        fitting: number of candidates that fit.
        considered: number of candidates that can train.
        refused: the different reasons why other candidates cannot train, each with the first of them.
    """

    number: int
    need: Need
    lacks: tuple[str, ...]
    fitting: int
    considered: int
    refused: tuple[str, ...] = ()


def choose(candidates: Sequence[Choice], needs: Sequence[Need | str], room: Room) -> Pick:
    """Chooses the fastest candidate that fits or, if none fits, the one that takes the least memory.

    Of candidates whose times are equal when they are rounded to about a hundredth, the first is chosen.

    Args:
        candidates: the simplest first.
        needs: the need of each candidate, or the reason why it cannot train.
        room: the available memory.

    Raises:
        ValueError: no candidate can train; the message has the reasons.
    """
    known = [(number, need, room.lacks(need)) for number, need in enumerate(needs) if isinstance(need, Need)]
    refused = _refusals(candidates, needs)
    if not known:
        raise ValueError("\n- ".join(["no candidate can run this module:", *refused]))

    def key(one: tuple[int, Need, tuple[str, ...]]) -> tuple[bool, bool, float]:
        number, need, lacks = one
        return preference(not lacks, candidates[number].reduced, need.times.bound, need.peak.total)

    number, need, lacks = min(known, key=key)
    return Pick(number, need, lacks, sum(not lacks for *_, lacks in known), len(known), refused)


def _refusals(candidates: Sequence[Choice], needs: Sequence[Need | str]) -> tuple[str, ...]:
    first: dict[str, Choice] = {}  # by the reason, of which many candidates may have the same
    for candidate, need in zip(candidates, needs, strict=True):
        if isinstance(need, str):
            first.setdefault(need, candidate)
    return tuple(f"{candidate.python} is refused: {reason}" for reason, candidate in first.items())
