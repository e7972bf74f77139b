"""A tensor that represents an averaged gradient of which each rank holds a slice; user code may compute with it.

Every operation on it either gives the exact result or raises an error that names the alternative:

* Element-wise functions, also in place, act on the slice without communication. Their other arguments may be numbers,
  tensors that can be expanded to the parameter's shape and are the same on all ranks, or averaged gradients of the same
  parameter. Results are held in slices again.
* Functions that reduce a gradient to one number, such as norms, are collective: a small exchange in float64.
* Factories (``torch.randn_like``) return ordinary tensors.

All other functions raise. They would need the values of other ranks, and a function that looks local must not
communicate.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, Protocol, Self

import torch
from torch import Tensor

from lightning_zero.sharding.collectives import Group
from lightning_zero.sharding.memory_format import MemoryFormat
from lightning_zero.storage import Executor, InlineExecutor, device_type
from lightning_zero.torch_private import (
    FOREACH,
    READS_NUMBER,
    TO_COPY,
    changes_arguments,
    make_wrapper,
    no_torch_function,
    tree_leaves,
    tree_map,
)


@dataclass(frozen=True)
class Place:
    """The position of this rank's slice in a parameter's gradient. Equal places mean the same elements.

    Attributes:
        name: name of the parameter.
        format: shape of the parameter, and the order of its elements in memory.
        start: the first element of the slice, in memory order.
        numel: number of elements of the slice; may be 0.
        group: the ranks that hold the slices.
        device: device of the parameter.
        slice_device: device of the slice.
        executor: copies between the two devices. The reference is weak, since user code may keep a computed gradient
            longer than the engine that drives the training.
    """

    name: str
    format: MemoryFormat
    start: int
    numel: int
    group: Group
    device: torch.device
    slice_device: torch.device
    executor: weakref.ref[Executor] = field(compare=False)

    def like(self, dtype: torch.dtype, device: torch.device | str = "meta") -> Tensor:
        """A tensor of the parameter's shape without values: on ``meta`` with its strides, else one element expanded."""
        if device == "meta":
            return torch.empty_strided(self.format.shape, self.format.strides, dtype=dtype, device=device)
        return torch.empty((), dtype=dtype, device=device).expand(self.format.shape)

    def cut(self, full: Tensor) -> Tensor:
        """This rank's slice (1-D) of ``full``, a tensor that can be expanded to the parameter's shape."""
        piece = torch.empty(self.numel, dtype=full.dtype, device=full.device)
        self.format.read(full.expand(self.format.shape), self.start, piece)
        return self.bring(piece)

    def bring(self, values: Tensor) -> Tensor:
        """``values`` on the device of the slice: themselves, or a copy that has arrived there."""
        if values.device.type == self.slice_device.type:
            return values.to(self.slice_device)
        executor = self.executor() or InlineExecutor()  # no engine is left
        begin = executor.commit if self.slice_device.type == "cpu" else executor.fetch
        arriving = torch.empty_like(values, device=self.slice_device)
        begin(arriving, values, self.name).synchronize()
        return arriving


class Slice(Protocol):
    """The elements of an averaged gradient that this rank holds."""

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self) -> Tensor:
        """The elements, 1-D; callers must not change them."""
        ...

    def change(self, function: Callable[[Tensor], object]) -> None:
        """Call ``function``, which changes the elements in place. The same call on all ranks."""
        ...

    def norm(self, order: float) -> float | None:
        """The norm over all slices, if it can be had otherwise than from :meth:`read`; else ``None``. Collective."""
        ...


class OwnSlice(NamedTuple):
    """The slice of a computed result, held in a tensor."""

    values: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def read(self) -> Tensor:
        """See :class:`Slice`."""
        return self.values

    def change(self, function: Callable[[Tensor], object]) -> None:
        """See :class:`Slice`."""
        function(self.values)

    def norm(self, order: float) -> None:
        """``None``: the norm must be computed from the values."""


class AveragedGradient(Tensor):
    """An averaged gradient held in slices; see the module's docstring.

    Args:
        place: position of this rank's slice.
        held: the elements of the slice.
    """

    place: Place
    held: Slice

    __torch_function__ = no_torch_function  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, place: Place, held: Slice) -> Self:
        with torch.inference_mode(False):  # it may outlive an inference-mode context in which it is made
            tensor = make_wrapper(cls, place.like(held.dtype), place.device)
        tensor.place, tensor.held = place, held
        return tensor

    def __init__(self, place: Place, held: Slice) -> None:
        """Do nothing: as for every tensor, ``__new__`` does the work."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs, name = dict(kwargs or {}), func.overloadpacket.__name__
        if name.startswith(FOREACH):
            return _one_by_one(name.removeprefix(FOREACH), args, kwargs)
        first = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, AveragedGradient))
        if name in _SAME:
            return first if name.endswith("_") else AveragedGradient(first.place, first.held)
        if func is READS_NUMBER:
            return _number(first)
        if name in _FACTORIES and args[0] is first:
            return func(first.place.like(first.dtype, first.device), *args[1:], **kwargs)
        if name in _REDUCTIONS and args[0] is first and (value := _reduced(name, first, args[1:], kwargs)) is not None:
            return value
        if name in _COPIES:
            if kwargs.pop("device", first.device) != first.device:
                first.refuse("a copy to another device")
            kwargs.pop("memory_format", None)  # slices are 1-D
        if (torch.Tag.pointwise in func.tags or name in _ELEMENT_WISE) and "out" not in kwargs:
            return _computed(func, name, first, args, kwargs)
        return first.refuse(name)

    def refuse(self, what: str) -> NoReturn:
        """Raise an error that says what to do instead."""
        raise RuntimeError(
            f"the gradient of {self.place.name!r} is averaged, and each rank holds a slice of it: {what} needs all of "
            "it. Element-wise functions with tensors of its shape work, and so do functions that return one number, "
            "such as norms. To read all of it, call lightning_zero.full_grad(parameter) on all ranks. To change it in "
            "another way, assign a full tensor to parameter.grad, the same on all ranks"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        shape = tuple(self.shape)
        return f"AveragedGradient({self.place.name!r}, shape={shape}, dtype={self.dtype}, in slices: see full_grad)"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()

    @property
    def data(self) -> Tensor:
        """The gradient itself; an assigned tensor is copied into it."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        self.copy_(value)

    # torch reads memory in these methods without calling `__torch_dispatch__`.

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Raises; see :meth:`refuse`."""
        self.refuse("numpy()")

    def tolist(self) -> NoReturn:
        """Raises; see :meth:`refuse`."""
        self.refuse("tolist()")

    def data_ptr(self) -> NoReturn:
        """Raises; see :meth:`refuse`."""
        self.refuse("data_ptr()")

    def untyped_storage(self) -> NoReturn:
        """Raises; see :meth:`refuse`."""
        self.refuse("untyped_storage()")

    def __array__(self, dtype: Any = None) -> NoReturn:
        self.refuse("a NumPy array")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self.refuse("a pickle")


_SAME = frozenset(("alias", "detach", "detach_"))
_FACTORIES = frozenset(
    """empty_like full_like ones_like rand_like randint_like randn_like zeros_like
    new_empty new_empty_strided new_full new_ones new_zeros""".split()
)
_COPIES = frozenset((TO_COPY, "clone"))
# Element-wise functions that torch does not tag as `pointwise`.
_ELEMENT_WISE = _COPIES | frozenset("abs_ copy_ fill_ masked_fill_ zero_".split())


# ---------------------------------------------------------------------------------------------- element-wise functions


def _computed(func: Any, name: str, first: AveragedGradient, args: Any, kwargs: Any) -> Any:
    """Compute an element-wise function on the slice; a function in place changes its first argument."""
    place = first.place

    def local(value: Any) -> Any:
        if isinstance(value, AveragedGradient):
            if value.place != place:
                first.refuse(f"{name} with the gradient of {value.place.name!r}")
            return value.held.read()
        if not isinstance(value, Tensor):
            return value
        if not value.dim():
            return place.bring(value)
        if torch.broadcast_shapes(value.shape, place.format.shape) != place.format.shape:
            first.refuse(f"{name} with a tensor of shape {tuple(value.shape)}")
        return place.cut(value)

    if not changes_arguments(func):
        result = func(*tree_map(local, args), **tree_map(local, kwargs))
        if not all(isinstance(leaf, Tensor) and leaf.numel() == place.numel for leaf in tree_leaves(result)):
            first.refuse(name)  # torch's tag is wrong
        return tree_map(lambda value: AveragedGradient(place, OwnSlice(value)), result)
    if args[0] is not first:
        first.refuse(f"{name} on an ordinary tensor")
    others = tree_map(local, (args[1:], kwargs))
    first.held.change(lambda values: func(values, *others[0], **others[1]))
    return first


def _one_by_one(name: str, args: Any, kwargs: Any) -> list[Any] | None:
    """Compute a ``_foreach_`` function, whose arguments are lists, one element of the lists at a time."""

    def of(number: int) -> Any:
        def pick(value: Any) -> Any:
            return value[number] if isinstance(value, list | tuple) else value

        chosen, named = [pick(value) for value in args], {key: pick(value) for key, value in kwargs.items()}
        if name.startswith(("addcdiv", "addcmul")) and len(chosen) > 3:
            named["value"] = chosen.pop()  # the functions of single tensors take it by keyword only
        if name == "norm":
            return torch.linalg.vector_norm(*chosen, **named)
        return getattr(Tensor, name)(*chosen, **named)

    results = [of(number) for number in range(len(args[0]))]
    return None if name.endswith("_") else results


# ---------------------------------------------------------------------------------------------------------- reductions


class _Reduction(NamedTuple):
    """A function that reduces all elements to one number, computed from one part per slice."""

    partial: Callable[[Tensor], Tensor]  # a slice that is not empty -> its part, 0-dim float64
    extreme: bool = False  # whether the parts are combined by their maximum, otherwise by their sum
    finish: Callable[[float, int], float] = lambda total, numel: total  # combined parts, number of elements -> result
    dtype: torch.dtype | None = None  # of the result; `None`: the gradient's dtype, and int64 for sums of integers


def _sum(values: Tensor) -> Tensor:
    return values.sum(dtype=torch.float64)


def _greatest(values: Tensor) -> Tensor:
    return values.max().double()


def _negative_least(values: Tensor) -> Tensor:
    return -values.min().double()


def _nonzero(values: Tensor) -> Tensor:
    return values.count_nonzero().double()


def _zeros(values: Tensor) -> Tensor:
    return values.numel() - _nonzero(values)


_MAX = _Reduction(_greatest, extreme=True)
_MIN = _Reduction(_negative_least, extreme=True, finish=lambda total, numel: -total)
_REDUCTIONS: dict[str, _Reduction | None] = {
    "sum": _Reduction(_sum),
    "mean": _Reduction(_sum, finish=lambda total, numel: total / numel),
    "max": _MAX,
    "amax": _MAX,
    "min": _MIN,
    "amin": _MIN,
    "all": _Reduction(_zeros, finish=lambda total, numel: total == 0, dtype=torch.bool),
    "any": _Reduction(_nonzero, finish=lambda total, numel: total > 0, dtype=torch.bool),
    "count_nonzero": _Reduction(_nonzero, dtype=torch.int64),
    "linalg_vector_norm": None,  # depends on the order: see `_reduced`
    "norm": None,
}


def _number(gradient: AveragedGradient) -> complex | float | int | bool:
    """The value of a gradient with one element, as a Python number. Collective."""
    if gradient.numel() != 1:
        return gradient.refuse("its value as a number")
    value = _reduced("sum", gradient, (), {"dtype": gradient.dtype})
    assert value is not None
    return value.item()


def _reduced(name: str, gradient: AveragedGradient, args: Any, kwargs: Any) -> Tensor | None:
    """Compute a reduction; ``None`` if the result would be more than one number. Collective."""
    args, kwargs, order = list(args), dict(kwargs), 2.0
    dtype = kwargs.pop("dtype", None)
    if name in ("norm", "linalg_vector_norm") and args:
        order = 2.0 if (given := args.pop(0)) is None else float(given)
    dims = kwargs.pop("dim", args.pop(0) if args else None)
    if isinstance(dims, Tensor):  # `torch.max(a, b)` is element-wise
        return None
    every = dims is None or sorted(dim % max(gradient.dim(), 1) for dim in _as_list(dims)) == [*range(gradient.dim())]
    if any(args) or any(kwargs.values()) or not (every or dims == []) or (name in ("max", "min") and dims is not None):
        return None
    place, held = gradient.place, gradient.held
    reduction = _REDUCTIONS[name]
    if reduction is None:
        if (norm := held.norm(order)) is None:
            norm = finish_norm(order, reduce_parts([norm_part(held.read(), order)], order, place)[0])
        return torch.tensor(norm, dtype=dtype or gradient.dtype, device=place.device)
    values = held.read()
    identity = -torch.inf if reduction.extreme else 0.0
    part = reduction.partial(values) if place.numel else values.new_full((), identity, dtype=torch.float64)
    order = torch.inf if reduction.extreme else 1.0
    total = reduction.finish(reduce_parts([part], order, place)[0], gradient.numel())
    made = reduction.dtype or dtype or gradient.dtype
    if name == "sum" and dtype is None and not made.is_floating_point:
        made = torch.int64
    return torch.tensor(total, dtype=made, device=place.device)


def _as_list(dims: Any) -> list[int]:
    return [dims] if isinstance(dims, int) else list(dims)


def norm_part(values: Tensor, order: float) -> Tensor:
    """One rank's part of a norm of a 1-D slice, for :func:`reduce_parts`; 0-dim float64.

    It is the sum of the powers of the magnitudes; for ``order=inf`` the greatest magnitude, for ``order=-inf`` the
    negative of the least.
    """
    if not values.numel():
        return values.new_full((), -torch.inf if order == -torch.inf else 0.0, dtype=torch.float64)
    norm: Tensor = torch.linalg.vector_norm(values, order, dtype=torch.float64)
    if order == -torch.inf:
        return -norm
    return norm**order if order not in (0.0, torch.inf) else norm


def finish_norm(order: float, total: float) -> float:
    """Compute a norm from ``total``, the result of :func:`reduce_parts` for the parts of :func:`norm_part`."""
    if order == -torch.inf:
        return -total
    if order in (0.0, torch.inf):
        return total
    # As a tensor: a total of 0 with a negative order gives infinity, where Python raises.
    return float(torch.tensor(total, dtype=torch.float64, device="cpu") ** (1.0 / order))


def reduce_parts(parts: list[Tensor], order: float, place: Place) -> list[float]:
    """Combine the parts of all ranks, by their sum or, with an infinite ``order``, their maximum. Collective.

    Args:
        parts: 0-dim, float64, one for each of several gradients; the group of ``place`` holds all their slices.
        order: order of the norm.
        place: gives the group and the device; its name appears in error messages.

    Returns:
        One number for each gradient, the same on all ranks.
    """
    together = [torch.stack([*those]) for _, those in itertools.groupby(parts, lambda part: part.device)]
    mine = torch.cat([device_type(place.device).send(those, place.device) for those in together])
    group, greatest = place.group, abs(order) == torch.inf
    what = f"{'compare' if greatest else 'sum up'} what ranks hold of the gradient of {place.name}"
    with group.explaining(what):
        if greatest:
            table = mine.new_zeros(group.size * len(mine))
            table.view(group.size, -1)[group.rank] = mine
            group.all_gather_(table, what)
            total = table.view(group.size, -1).amax(dim=0)
        else:
            total = group.all_reduce_(mine, what)
        values: list[float] = total.tolist()
    return values
