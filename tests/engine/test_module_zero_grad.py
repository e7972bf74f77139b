"""``zero_grad`` of a module that an engine holds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from lightning_zero.update.attached import attach_module, detach_module


class Target:
    """Counts how often an engine would clear gradients."""

    cleared = 0

    def zero_grad(self, parameters: Iterable[nn.Parameter], set_to_none: bool = True) -> None:
        self.cleared += len(list(parameters)) == 2


def test_a_method_of_the_object_s_own_still_runs_and_comes_back() -> None:
    module, target = nn.Linear(2, 2), Target()
    calls: list[Any] = []

    def own(*args: Any, **kwargs: Any) -> None:
        calls.append((args, kwargs))

    module.zero_grad = own  # type: ignore[method-assign]
    attach_module(module, target)  # type: ignore[arg-type]
    attach_module(module, target)  # type: ignore[arg-type]
    module.zero_grad()
    module.zero_grad(set_to_none=False)
    assert calls == [((), {}), ((), {"set_to_none": False})]
    assert target.cleared == 2
    detach_module(module)
    assert vars(module)["zero_grad"] is own
