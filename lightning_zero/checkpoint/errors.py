"""Errors of checkpoints, and functions that raise them on all ranks together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from lightning_zero.advice import Case, advice
from lightning_zero.sharding import Group

T = TypeVar("T")
NAMED = 3  # largest number of names in a message; of further ones it gives only the number


class CheckpointError(RuntimeError):
    """Raised when a checkpoint cannot be written, read or converted; the message says what to do."""


def damaged(path: object, names: Iterable[str], place: str = "") -> CheckpointError:
    """The error for a checkpoint in which the checksums of the tensors ``names`` do not match, at the end ``place``."""
    return CheckpointError(
        f"{path} is damaged: the checksum of {shortened(names)} does not match{place}. Use an earlier checkpoint"
        f"{advice(Case.DAMAGED, '; ')}"
    )


def shortened(names: Iterable[str]) -> str:
    """The first :data:`NAMED` names, and the number of further ones."""
    names = list(names)
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more}"


def together(world: Group, act: Callable[[], T], what: str) -> list[T]:
    """Run ``act`` on all ranks and return all results, in rank order. Collective.

    Raises:
        CheckpointError: ``act`` failed on a rank; raised on all ranks, and says what happened on which.
    """
    result, caught, message = _attempt(act)
    outcomes: list[tuple[Any, str | None]] = world.all_gather_object((result, message), what)
    failed = {rank: text for rank, (_, text) in enumerate(outcomes) if text is not None}
    if failed:
        said = "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
        raise CheckpointError(f"could not {what}. {said}") from caught
    return [result for result, _ in outcomes]


def on_first(world: Group, act: Callable[[], T], what: str) -> T:
    """Run ``act`` on rank 0 and return its result on all ranks. Collective.

    Raises:
        CheckpointError: ``act`` failed; raised on all ranks.
    """
    result, caught, message = _attempt(act) if world.rank == 0 else (None, None, None)
    outcome: tuple[Any, str | None] = world.broadcast_object((result, message), what)
    if outcome[1] is not None:
        raise CheckpointError(f"could not {what}. rank 0: {outcome[1]}") from caught
    return outcome[0]  # type: ignore[no-any-return]


def _attempt(act: Callable[[], T]) -> tuple[T | None, Exception | None, str | None]:
    """The result of ``act``, or its error and the error's text, which the caller raises on all ranks."""
    try:
        return act(), None, None
    except Exception as error:  # noqa: BLE001  # see above
        return None, error, f"{type(error).__name__}: {error}"
