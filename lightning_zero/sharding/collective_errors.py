"""Errors of collectives: their classes, those of the backends, and messages for ranks that differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch.distributed as dist

from lightning_zero.advice import Case, advice
from lightning_zero.sharding.board import Board

# Words in errors of gloo, which are plain `RuntimeError`s. The second occurs if the timeout of another operation has
# closed the connection.
_OF_GLOO = ("/gloo/", "Application timeout caused pair closure")
_CLOSED = ("closed by peer", "reset by peer", "Broken pipe")  # in errors of gloo


class CollectiveError(RuntimeError):
    """Raised when ranks did not issue the same collectives, or when a rank is missing."""


class MismatchError(RuntimeError):
    """Raised when another rank offers another message than expected; says in which way, after a colon, if it can."""


@dataclass
class Waiting:
    """The rank of a group for which this rank waits, and to which an error belongs; ``None``: for all ranks."""

    rank: int | None = None


def is_communication_error(error: BaseException) -> bool:
    """Whether an error comes from a collective, of this package or of other code that uses ``torch.distributed``."""
    return isinstance(error, CollectiveError | dist.DistError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in _OF_GLOO)
    )


def tells_an_end(error: str) -> bool:
    """Whether an error says that another rank has closed its connections."""
    return any(words in error for words in _CLOSED)


def expectation() -> str:
    """Says what ranks must do alike."""
    return (
        "All ranks must run the same units in the same order, and as many backward passes and steps"
        f"{advice(Case.RANKS_DIFFER, '. ')}"
    )


def disagreement(wants: Mapping[int, str], board: Board) -> str:
    """The message for ranks that do, or have done, different things. ``wants``: what each does, by world rank."""
    ranks: dict[str, list[int]] = {}
    for rank, want in wants.items():
        ranks.setdefault(want, []).append(rank)
    said = "; ".join(f"{board.describe(own)}: {want}" for want, own in ranks.items())
    cause = board.explain()
    return f"ranks do not do the same. {said}. {f'The cause: {cause}' if cause else expectation()}"


def failure(what: str, error: RuntimeError, board: Board, own: int, waited: int | None, recent: Iterable[str]) -> str:
    """The message for an error of the backend or an exchange. If the cause is known, it comes last.

    Args:
        what: what this rank was about to do.
        error: the error.
        board: notes of all ranks.
        own: this rank, of the world.
        waited: the rank for which this one waited; ``None``: for no rank in particular.
        recent: the last collectives that this rank issued.
    """
    failed = f"rank {own} of {dist.get_world_size()}{board.place(own)} could not {what}"
    ended = tells_an_end(str(error))
    past = f"Before it, this rank had asked for: {', '.join(recent) or 'nothing'}. {expectation()}"
    cause, missing = board.explain(), ""
    if not cause and isinstance(error, MismatchError) and waited is not None:
        return f"{failed}, because {board.describe([waited])} does something else{error}. {past}"
    if not cause:
        missing = board.describe(board.find_missing(waited, ended))
        cause = board.explain()  # a rank may have noted it in the meantime
    if cause:
        return f"{failed}, because {cause}"
    if ended and missing:  # if none is missing, a rank that gave up waiting has closed connections
        return (
            f"{failed}, because {missing} has ended without a Python error: it was killed, say, or its node is down "
            f"({error})"
        )
    return (
        f"{failed}: {missing or 'another rank'} failed, or does something else than this one, or takes longer than the "
        f"timeout{', or its node or the network to it is down' if missing else ''}. {past} ({error})"
    )
