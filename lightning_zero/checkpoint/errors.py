"""Errors of checkpoints, and how all ranks learn of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from lightning_zero.advice import Case, advice
from lightning_zero.sharding import Group

T = TypeVar("T")
NAMED = 3  # names in a message; of more there is only the number


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, read, or turned into what was asked for; the message says what to do."""


def damaged(path: object, names: Iterable[str]) -> CheckpointError:
    """The error of a checkpoint in which the checksums of the tensors ``names`` do not match."""
    return CheckpointError(
        f"{path} is damaged: the checksum of {shortened(names)} does not match. Use an earlier checkpoint"
        f"{advice(Case.DAMAGED, '; ')}"
    )


def shortened(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more}"


def together(world: Group, act: Callable[[], T], what: str) -> list[T]:
    """Run ``act`` on all ranks; returns all results, in rank order. Collective.

    Raises:
        CheckpointError: on all ranks, where it failed on one.
    """
    result, caught, message = _attempt(act)
    outcomes: list[tuple[Any, str | None]] = world.all_gather_object((result, message), what)
    failed = {rank: text for rank, (_, text) in enumerate(outcomes) if text is not None}
    if failed:
        said = "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
        raise CheckpointError(f"could not {what}. {said}") from caught
    return [result for result, _ in outcomes]


def on_first(world: Group, act: Callable[[], T], what: str) -> T:
    """Run ``act`` on rank 0; returns its result on all ranks. Collective.

    Raises:
        CheckpointError: on all ranks, where it failed.
    """
    result, caught, message = _attempt(act) if world.rank == 0 else (None, None, None)
    outcome: tuple[Any, str | None] = world.broadcast_object((result, message), what)
    if outcome[1] is not None:
        raise CheckpointError(f"could not {what}. rank 0: {outcome[1]}") from caught
    return outcome[0]  # type: ignore[no-any-return]


def _attempt(act: Callable[[], T]) -> tuple[T | None, Exception | None, str | None]:
    """The result, or the error and its text, which a caller raises when all ranks know."""
    try:
        return act(), None, None
    except Exception as error:  # noqa: BLE001  # see above
        return None, error, f"{type(error).__name__}: {error}"
