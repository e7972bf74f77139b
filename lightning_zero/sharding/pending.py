"""Pending parameters: their update is running, and code that reads one waits for the update first.

While a bucket is updated asynchronously and its parameters are views of the shard, their class is a subclass whose
``__torch_function__`` waits before every operation except on metadata. So user code never sees old or partly written
values, and code that reads no values does not wait. A tensor that shares memory with a parameter and was made before
the step is not intercepted.

The functions at the end give parameters the class that says what they are: freed, pending or ordinary ones.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, SupportsIndex

from torch.nn import Parameter

from lightning_zero.sharding.freed import FreedParameter, MarkedParameter, is_metadata, mark, unmark
from lightning_zero.torch_private import no_subclass_functions, tree_leaves


class PendingParameter(MarkedParameter):
    """A parameter whose values are being updated, or whose gather is deferred."""

    _zero_await: Callable[[], None]  # waits for the values, and makes the parameter an ordinary one

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if is_metadata(func):
            with no_subclass_functions():
                return func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, PendingParameter):
                leaf._zero_await()
        return func(*args, **(kwargs or {}))

    # These three depend on the class of the parameter, so they wait before it is read.

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        self._zero_await()
        return repr(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        self._zero_await()
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        self._zero_await()
        return self.__reduce_ex__(protocol)


def mark_freed(parameter: Parameter, name: str) -> None:
    """Make every use of ``parameter``, except of its metadata, an error that gives ``name``."""
    mark_ordinary(parameter)
    parameter._zero_name = name  # type: ignore[attr-defined]
    mark(parameter, FreedParameter)


def mark_pending(parameter: Parameter, await_values: Callable[[], None]) -> None:
    """Make every use of ``parameter``, except of its metadata, call ``await_values`` first.

    ``await_values`` must make the parameter an ordinary one, by :func:`mark_ordinary`, or raise.
    """
    parameter._zero_await = await_values  # type: ignore[attr-defined]
    mark(parameter, PendingParameter)


def mark_ordinary(parameter: Parameter) -> None:
    """Undo :func:`mark_freed` and :func:`mark_pending`."""
    if isinstance(parameter, PendingParameter):
        del parameter._zero_await
    unmark(parameter)
