"""Errors of collectives: their classes, those of the backends, and messages for ranks that differ."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist

from lightning_zero.advice import Case, advice
from lightning_zero.sharding.board import Board

# Words in errors of gloo, which are plain `RuntimeError`s. The second occurs if the timeout of another operation has
# closed the connection.
_OF_GLOO = ("/gloo/", "Application timeout caused pair closure")
_CLOSED = ("closed by peer", "reset by peer", "Broken pipe")  # in errors of gloo


class CollectiveError(RuntimeError):
    """Raised when ranks did not issue the same collectives, or when a rank is missing."""


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
