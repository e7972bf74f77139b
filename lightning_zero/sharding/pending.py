"""Parameters whose update is under way: whoever reads one waits for it, and finds an ordinary parameter.

While the shard of a bucket is updated beside the training, and the shard is what its parameters show, their class is a
subclass whose ``__torch_function__`` waits before everything but metadata. So code of the user's never sees a value
from before the step, or one that is half written, and whoever reads nothing waits for nothing. A tensor that shares
memory with a parameter, made before the step, is not intercepted: nobody can tell what reads it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, SupportsIndex

from torch.nn import Parameter

from lightning_zero.sharding.freed import MarkedParameter, is_metadata, mark, unmark
from lightning_zero.torch_private import no_subclass_functions, tree_leaves


class PendingParameter(MarkedParameter):
    """A parameter whose values are being updated."""

    _zero_await: Callable[[], None]  # ends the update, and makes the parameter an ordinary one

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

    # These ask for the class before they ask for values.

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        self._zero_await()
        return repr(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        self._zero_await()
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        self._zero_await()
        return self.__reduce_ex__(protocol)


def mark_pending(parameter: Parameter, await_update: Callable[[], None]) -> None:
    """Have every use of ``parameter`` but its metadata call ``await_update`` first, which calls :func:`end_pending`."""
    if isinstance(parameter, PendingParameter) or not isinstance(parameter, MarkedParameter):
        parameter._zero_await = await_update  # type: ignore[attr-defined]
    if not isinstance(parameter, MarkedParameter):
        mark(parameter, PendingParameter)


def end_pending(parameter: Parameter) -> None:
    """Undo :func:`mark_pending`."""
    if isinstance(parameter, PendingParameter):
        unmark(parameter)
        del parameter._zero_await
