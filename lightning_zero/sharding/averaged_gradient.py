"""A gradient of which every rank holds a slice, as a tensor that user code may compute with.

What is done with one is exact, or an error that says what to do instead:

* element-wise functions, also in place, act on the slice, without communication. Their other arguments are numbers,
  tensors of the parameter's shape, the same on all ranks, or gradients of the same parameter. What they return is again
  held in slices.
* functions that reduce a gradient to one number, such as norms, are collective: a small exchange, in float64.
* factories (``torch.randn_like``) return ordinary tensors.

Everything else would need the values of other ranks, and a function that looks local must not start to communicate.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Protocol, Self

import torch
from torch import Tensor

from lightning_zero.sharding.collectives import Group
from lightning_zero.sharding.memory_format import MemoryFormat
from lightning_zero.storage.accelerators import device_type
from lightning_zero.torch_private import changes_arguments, make_wrapper, no_torch_function, tree_leaves, tree_map


@dataclass(frozen=True)
class Place:
    """The slice of a parameter's gradient that this rank holds; of equal ones the elements are the same.

    Attributes:
        name: of the parameter.
        format: its shape, and the order of its elements.
        start: the first element held, in that order.
        numel: how many are held; may be 0.
        group: the ranks that hold the other slices.
        device: of the parameter.
        slice_device: where the slice can be computed with.
    """

    name: str
    format: MemoryFormat
    start: int
    numel: int
    group: Group
    device: torch.device
    slice_device: torch.device

    def like(self, dtype: torch.dtype, device: torch.device | str = "meta") -> Tensor:
        """A tensor with the parameter's shape and strides; on a real device all elements share their memory."""
        if device == "meta":
            return torch.empty_strided(self.format.shape, self.format.strides, dtype=dtype, device=device)
        return torch.empty((), dtype=dtype, device=device).expand(self.format.shape)

    def cut(self, full: Tensor) -> Tensor:
        """The elements of ``full``, which has or can be expanded to the parameter's shape, that this rank holds."""
        piece = torch.empty(self.numel, dtype=full.dtype, device=self.slice_device)
        self.format.read(full.expand(self.format.shape), self.start, piece)
        return piece


class Slice(Protocol):
    """The elements of a gradient that this rank holds."""

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self) -> Tensor:
        """The elements, 1-D, not to be changed."""
        ...

    def change(self, function: Callable[[Tensor], object]) -> None:
        """Call ``function``, which changes the elements in place, on all ranks."""
        ...

    def norm(self, order: float) -> float | None:
        """The norm of all slices, where it need not be computed of this one. Collective."""
        ...


class OwnSlice(NamedTuple):
    """The slice of a result."""

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
        """It must be computed."""


class AveragedGradient(Tensor):
    """See the module's docstring.

    Args:
        place: which elements are held here.
        held: these elements.
    """

    place: Place
    held: Slice

    __torch_function__ = no_torch_function  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, place: Place, held: Slice) -> Self:
        with torch.inference_mode(False):  # it outlives the context in which it was first asked for
            tensor = make_wrapper(cls, place.like(held.dtype), place.device)
        tensor.place, tensor.held = place, held
        return tensor

    def __init__(self, place: Place, held: Slice) -> None:
        """Everything is done by ``__new__``, as for every tensor."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs, name = dict(kwargs or {}), func.overloadpacket.__name__
        if name.startswith("_foreach_"):
            return _one_by_one(name.removeprefix("_foreach_"), args, kwargs)
        first = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, AveragedGradient))
        if name in _SAME:
            return first if name.endswith("_") else AveragedGradient(first.place, first.held)
        if name == "_local_scalar_dense":
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
        """Say what to do instead."""
        raise RuntimeError(
            f"the gradient of {self.place.name!r} is averaged, and each rank holds a slice of it: {what} needs all of "
            "it. Element-wise functions of it and of tensors of its shape work, and those that return one number, such "
            "as norms. Read it whole by lightning_zero.full_grad(parameter), on all ranks. To change it otherwise, "
            "assign a whole tensor to parameter.grad, the same on all ranks"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        shape = tuple(self.shape)
        return f"AveragedGradient({self.place.name!r}, shape={shape}, dtype={self.dtype}, in slices: see full_grad)"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()

    @property
    def data(self) -> Tensor:
        """The gradient itself; what is assigned is copied."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        self.copy_(value)

    # What torch answers from memory, without a function that could be intercepted.

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Refused."""
        self.refuse("numpy()")

    def tolist(self) -> NoReturn:
        """Refused."""
        self.refuse("tolist()")

    def data_ptr(self) -> NoReturn:
        """Refused."""
        self.refuse("data_ptr()")

    def untyped_storage(self) -> NoReturn:
        """Refused."""
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
_COPIES = frozenset(("_to_copy", "clone"))
# Those that torch does not tag as such.
_ELEMENT_WISE = _COPIES | frozenset("abs_ copy_ fill_ masked_fill_ zero_".split())


# ---------------------------------------------------------------------------------------------- element-wise functions


def _computed(func: Any, name: str, first: AveragedGradient, args: Any, kwargs: Any) -> Any:
    """The result of an element-wise function, slice by slice; one in place changes its first argument."""
    place = first.place

    def local(value: Any) -> Any:
        if isinstance(value, AveragedGradient):
            if value.place != place:
                first.refuse(f"{name} with the gradient of {value.place.name!r}")
            return value.held.read()
        if not isinstance(value, Tensor):
            return value
        if not value.dim():
            return value.to(place.slice_device)
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
    """A function of several lists, of which some hold gradients."""

    def of(number: int) -> Any:
        def pick(value: Any) -> Any:
            return value[number] if isinstance(value, list | tuple) else value

        chosen, named = [pick(value) for value in args], {key: pick(value) for key, value in kwargs.items()}
        if name.startswith(("addcdiv", "addcmul")) and len(chosen) > 3:
            named["value"] = chosen.pop()  # of one tensor by keyword only
        if name == "norm":
            return torch.linalg.vector_norm(*chosen, **named)
        return getattr(Tensor, name)(*chosen, **named)

    results = [of(number) for number in range(len(args[0]))]
    return None if name.endswith("_") else results


# ---------------------------------------------------------------------------------------------------------- reductions


class _Reduction(NamedTuple):
    """A function of all elements, as one of what it is of each slice."""

    partial: Callable[[Tensor], Tensor]  # of a slice that is not empty, float64
    extreme: bool = False  # the result is the greatest of the parts, else their sum
    finish: Callable[[float, int], float] = lambda total, numel: total  # of that, and the number of all elements
    dtype: torch.dtype | None = None  # of the result; `None`: that of the gradient, of sums at least int64


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
    "linalg_vector_norm": None,  # by its order
    "norm": None,
}


def _number(gradient: AveragedGradient) -> complex | float | int | bool:
    """The value of a gradient of one element. Collective."""
    if gradient.numel() != 1:
        return gradient.refuse("its value as a number")
    value = _reduced("sum", gradient, (), {"dtype": gradient.dtype})
    assert value is not None
    return value.item()


def _reduced(name: str, gradient: AveragedGradient, args: Any, kwargs: Any) -> Tensor | None:
    """The result of a function that reduces; ``None`` where it is more than one number."""
    args, kwargs, order = list(args), dict(kwargs), 2.0
    dtype = kwargs.pop("dtype", None)
    if name in ("norm", "linalg_vector_norm") and args:
        order = 2.0 if (given := args.pop(0)) is None else float(given)
    dims = kwargs.pop("dim", args.pop(0) if args else None)
    if isinstance(dims, Tensor):  # the greater ones of two
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
    """One rank's part of a norm, 0-dim float64: a sum, or with infinite orders the greatest or least magnitude."""
    if not values.numel():
        return values.new_full((), -torch.inf if order == -torch.inf else 0.0, dtype=torch.float64)
    norm: Tensor = torch.linalg.vector_norm(values, order, dtype=torch.float64)
    if order == -torch.inf:
        return -norm
    return norm**order if order not in (0.0, torch.inf) else norm


def finish_norm(order: float, total: float) -> float:
    """The norm, of what :func:`reduce_parts` made of :func:`norm_part`."""
    if order == -torch.inf:
        return -total
    if order in (0.0, torch.inf):
        return total
    return float(torch.tensor(total, dtype=torch.float64) ** (1.0 / order))  # of 0 and negative orders: no error


def reduce_parts(parts: list[Tensor], order: float, place: Place) -> list[float]:
    """The sums of the ranks' parts, with an infinite ``order`` the greatest of them; the same on all. Collective.

    Args:
        parts: 0-dim, float64; of gradients whose slices the group of ``place`` holds.
        order: as above.
        place: its name is in messages.
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
