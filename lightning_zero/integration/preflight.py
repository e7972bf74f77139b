"""Checks, before a fit takes memory, whether its plan fits, and lists the settings that would fit."""

from __future__ import annotations

import io
from collections.abc import Sequence

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from rich.console import Console
from rich.table import Table

from lightning_zero.engine import Engine
from lightning_zero.integration.options import PreflightName
from lightning_zero.planning import preflight
from lightning_zero.planning.memory import Memory, candidates_table
from lightning_zero.planning.preflight import Claim
from lightning_zero.sharding import Group

_WIDTH = 120
_REASONS = 3  # printed reasons; if every rank has one, they are alike


class DoesNotFitError(RuntimeError):
    """A fit was refused on all ranks, because its plan needs more memory than there is."""


def check(memory: Memory, engine: Engine | None, world: Group, wish: PreflightName) -> None:
    """Compare the plan with the memory of devices, machines, control groups and process limits. Collective.

    The ranks exchange what they have. If there is more memory than any plan could take, no plan is made.

    Args:
        memory: of the fit.
        engine: of an earlier fit of this module.
        world: of all ranks.
        wish: see :class:`~lightning_zero.ZeroStrategy`.

    Raises:
        DoesNotFitError: on all ranks, if the plan of one of them does not fit and ``wish`` is ``"error"``.
    """
    if wish == "off":
        return
    mine = preflight.claims(memory.module, engine, memory.device, memory.rank)
    most = preflight.ceiling(memory.module)
    everyone = _exchange(preflight.with_plan(mine, most, memory.device), world)
    if not preflight.shortages(everyone):
        return
    try:
        wanted = preflight.with_plan(mine, memory.plan.peak, memory.device)
    except (TypeError, ValueError):  # the engine is made next, and raises the same error on all ranks
        wanted = []
    everyone = _exchange([claim for claim in wanted if _counts(claim, memory.device)], world)
    short = preflight.shortages(everyone)
    if not short:
        return
    reasons = [f"- {shortage}" for shortage in short[:_REASONS]]
    reasons += [f"- and {len(short) - _REASONS} more"] * (len(short) > _REASONS)
    text = "\n".join(
        [
            "this fit needs more memory than there is, even without activations:",
            *reasons,
            _what_fits(memory, everyone),
            "Activations need additional memory. With preflight='warn' in the strategy the fit begins nevertheless.",
        ]
    )
    if wish == "warn":
        rank_zero_warn(text)
    else:
        raise DoesNotFitError(text)


def _exchange(mine: list[Claim], world: Group) -> list[Claim]:
    return [claim for claims in world.all_gather_object(mine, "compare plans with memory") for claim in claims]


def _counts(claim: Claim, device: torch.device) -> bool:
    """Whether a limit applies: the one of locked memory only if the driver respects it."""
    if claim.pool.side != "locked":
        return True
    return claim.wanted > claim.pool.total and preflight.lock_limit_holds(device, claim.pool.total)


def _what_fits(memory: Memory, everyone: Sequence[Claim]) -> str:
    """A table of changes, those that fit first."""
    fits = {typed: preflight.fits(everyone, plan.peak, memory.device) for typed, plan in memory.changes.items()}
    chosen = {typed: plan for typed, plan in memory.changes.items() if fits[typed]}
    if not chosen:
        least = min(memory.changes.items(), key=lambda item: item[1].peak.total, default=None)
        if least is None:
            return ""
        return _as_text(candidates_table("No change fits. The smallest, MiB", dict([least])))
    return _as_text(candidates_table("Changes that fit, MiB", chosen))


def _as_text(table: Table) -> str:
    console = Console(file=io.StringIO(), width=_WIDTH, color_system=None)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()
