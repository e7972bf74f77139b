"""Freed parameters: while a bucket holds only its shard, its parameters have metadata, and reading values raises.

PyTorch does not raise when code computes with a tensor whose storage was freed; it reads freed memory. So the class of
a freed parameter is a subclass whose ``__torch_function__`` raises an error with the parameter's name. Metadata stays
available, so that parameter counts and summaries are right.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torch.nn import Parameter

from lightning_zero.advice import Case, advice
from lightning_zero.torch_private import PRIVATE_METADATA, no_subclass_functions, tree_leaves

P = ParamSpec("P")
T = TypeVar("T")

_METADATA = PRIVATE_METADATA | frozenset(
    """shape dtype device layout ndim names requires_grad grad grad_fn grad_dtype is_leaf retains_grad
    is_cuda is_cpu is_meta is_sparse is_quantized is_mkldnn is_complex is_nested is_xla is_mps is_xpu output_nr
    size dim numel nelement stride storage_offset element_size itemsize nbytes is_contiguous is_floating_point is_signed
    is_inference ndimension get_device register_hook register_post_accumulate_grad_hook requires_grad_ retain_grad
    __hash__ __len__
    empty_like full_like ones_like zeros_like rand_like randn_like new_empty new_full new_ones new_zeros""".split()
)
_ACCESSORS = frozenset(("__get__", "__set__", "__delete__"))


class MarkedParameter(Parameter):
    """A parameter whose class intercepts its uses; see :func:`mark`."""


class FreedParameter(MarkedParameter):
    """A parameter whose storage is freed at stage 3, outside the forward and backward of its unit."""

    _zero_name: str

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self._zero_name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not is_metadata(func):
            freed = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, FreedParameter)]
            names = ", ".join(repr(parameter._zero_name) for parameter in freed)
            raise RuntimeError(
                f"{function_name(func)} on parameter {names or '(unknown)'}, which is freed: at stage 3 a rank holds "
                f"only a shard of it outside its module's forward and backward{advice(Case.FREED, '. ')}"
            )
        with no_subclass_functions():
            return func(*args, **(kwargs or {}))


def is_metadata(func: Callable[..., Any]) -> bool:
    """Whether an operation reads only metadata, no values of a parameter."""
    return function_name(func) in _METADATA


def function_name(func: Callable[..., Any]) -> str:
    """The name of the function or property that ``__torch_function__`` was called for."""
    name: str = getattr(func, "__name__", str(func))
    if name in _ACCESSORS:  # an access to a property, whose descriptor has the name
        name = func.__self__.__name__  # type: ignore[attr-defined]
    return name


@functools.cache
def _marked_class(base: type[MarkedParameter], cls: type[Parameter]) -> type[Parameter]:
    name = f"{base.__name__.removesuffix('Parameter')}{cls.__name__}"
    return base if cls is Parameter else type(name, (base, cls), {})


@functools.cache
def own_class(cls: type[Parameter]) -> type[Parameter]:
    """The class of a parameter before it was marked."""
    return next(c for c in cls.__mro__ if issubclass(c, Parameter) and not issubclass(c, MarkedParameter))


def without_freed_checks(function: Callable[P, T]) -> Callable[P, T]:
    """Decorates functions of the engine that read gradients and metadata only: their accesses are not intercepted.

    This saves the time of the interception.
    """

    @functools.wraps(function)
    def unchecked(*args: P.args, **kwargs: P.kwargs) -> T:
        with no_subclass_functions():
            return function(*args, **kwargs)

    return unchecked


def mark(parameter: Parameter, base: type[MarkedParameter]) -> None:
    """Let the class ``base``, and no other one, intercept every use of ``parameter``."""
    parameter.__class__ = _marked_class(base, own_class(type(parameter)))


def unmark(parameter: Parameter) -> None:
    """Undo :func:`mark`."""
    parameter.__class__ = own_class(type(parameter))
