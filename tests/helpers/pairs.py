"""Pairwise parametrization: any two values of two settings occur together in some test, instead of all combinations."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest


def pairwise(*, where: Callable[..., bool] | None = None, **axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Runs a test for rows in which every pair of values of two arguments occurs.

    Defects that require a combination of three settings are rare (Kuhn, Wallace and Gallo, "Software fault interactions
    and implications for software testing", 2004), and all combinations of five settings cost many times as much.
    `where` is called with the arguments of a row by name and tells whether the row is possible; a pair that occurs in
    no possible row is left out. The rows are the same in every run.
    """
    rows = [dict(zip(axes, row, strict=True)) for row in itertools.product(*axes.values())]
    return pytest.mark.parametrize(list(axes), [tuple(row.values()) for row in covering(rows, where)])


def covering(rows: Sequence[dict[str, Any]], where: Callable[..., bool] | None = None) -> list[dict[str, Any]]:
    """Chooses few of the possible rows that contain all pairs, greedily by the number of new pairs."""
    possible = [row for row in rows if where is None or where(**row)]
    pairs = [set(itertools.combinations(((name, repr(row[name])) for name in row), 2)) for row in possible]
    missing: set[Any] = set().union(*pairs)
    chosen = []
    while missing:
        best = max(range(len(possible)), key=lambda index: len(pairs[index] & missing))
        chosen.append(possible[best])
        missing -= pairs[best]
    return chosen
