"""Before a fit takes memory: does its plan fit, and if not, which strategies would?"""

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
_REASONS = 3  # that are printed; where every rank has one, they are the same


class DoesNotFitError(RuntimeError):
    """A fit was not begun, on any rank, because its plan takes more memory than there is."""


def check(memory: Memory, engine: Engine | None, world: Group, wish: PreflightName) -> None:
    """Compare the plan with what devices, machines, control groups and limits of processes have. Collective.

    The ranks exchange what they have; where more than any plan takes is there, nothing is planned.

    Args:
        memory: of the fit.
        engine: of an earlier fit of this module.
        world: of all ranks.
        wish: see :class:`~lightning_zero.ZeroStrategy`.

    Raises:
        DoesNotFitError: on all ranks alike, where the plan of one does not fit and ``wish`` is ``"error"``.
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
    except (TypeError, ValueError):  # the engine, which comes next, refuses the same with the other ranks
        wanted = []
    everyone = _exchange([claim for claim in wanted if _counts(claim, memory.device)], world)
    short = preflight.shortages(everyone)
    if not short:
        return
    reasons = [f"- {shortage}" for shortage in short[:_REASONS]]
    reasons += [f"- and {len(short) - _REASONS} more"] * (len(short) > _REASONS)
    text = "\n".join(
        [
            "this fit takes more memory than there is, even without activations:",
            *reasons,
            _what_fits(memory, everyone),
            "Activations come on top. With preflight='warn' in the strategy the fit begins all the same.",
        ]
    )
    if wish == "warn":
        rank_zero_warn(text)
    else:
        raise DoesNotFitError(text)


def _exchange(mine: list[Claim], world: Group) -> list[Claim]:
    return [claim for claims in world.all_gather_object(mine, "compare plans with memory") for claim in claims]


def _counts(claim: Claim, device: torch.device) -> bool:
    """Whether a limit is one: that of locked memory only where the driver heeds it."""
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
        return _as_text(candidates_table("Nothing fits. What takes least, MiB", dict([least])))
    return _as_text(candidates_table("What fits, MiB", chosen))


def _as_text(table: Table) -> str:
    console = Console(file=io.StringIO(), width=_WIDTH, color_system=None)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()
