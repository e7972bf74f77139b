"""A lazy tensor is an ordinary one to whoever touches it."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_zero.checkpoint.lazy import LazyTensor


class Counted:
    """A source of one tensor that counts how often it is asked."""

    key = "counted"
    live = False

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.fetched = 0

    def fetch(self, param: int) -> Tensor:
        self.fetched += 1
        return self.values.clone()


VALUES = torch.arange(6.0).view(2, 3)


def lazy(values: Tensor = VALUES) -> tuple[LazyTensor, Counted]:
    source = Counted(values)
    return LazyTensor(source, 0, values.to("meta")), source


def saved_and_loaded(tensor: Tensor) -> Any:
    buffer = io.BytesIO()
    torch.save({"t": tensor}, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)["t"]


def test_its_form_costs_nothing() -> None:
    tensor, source = lazy(VALUES.t())
    assert isinstance(tensor, Tensor)
    assert (tensor.shape, tensor.stride(), tensor.dtype, tensor.device) == ((3, 2), (1, 3), VALUES.dtype, VALUES.device)
    assert (tensor.dim(), tensor.ndim, tensor.numel(), len(tensor), tensor.nbytes) == (2, 2, 6, 3, 24)
    assert tensor.is_floating_point()
    assert [tensor.is_complex(), tensor.is_meta, tensor.requires_grad, tensor.is_contiguous()] == [False] * 4
    assert "3, 2" in repr(tensor)
    assert {tensor: 1}[tensor] == 1
    assert source.fetched == 0


@pytest.mark.parametrize(
    "use",
    [
        lambda t: t + 1,
        lambda t: 1 + t,
        lambda t: t[0, 1:],
        lambda t: torch.stack([t, t]),
        lambda t: torch.zeros(2, 3).copy_(t),
        lambda t: t.numpy(),
        np.asarray,
        lambda t: t.tolist(),
        lambda t: t.sum().item(),
        lambda t: t.detach().clone(),
        lambda t: t.data,
        lambda t: t.to(torch.float64),
        copy.deepcopy,
        lambda t: pickle.loads(pickle.dumps(t)),
        saved_and_loaded,
        list,
        lambda t: t.untyped_storage().nbytes(),
    ],
)
def test_anything_else_gives_what_an_ordinary_tensor_gives(use: Callable[[Tensor], Any]) -> None:
    tensor, source = lazy()
    result, expected = use(tensor), use(VALUES.clone())
    assert type(result) is type(expected)
    assert not isinstance(result, LazyTensor)
    assert np.array_equal(np.asarray(result, dtype=float), np.asarray(expected, dtype=float))
    assert source.fetched == 1


def test_changes_in_place_stay() -> None:
    tensor, source = lazy()
    tensor.mul_(2)
    tensor[0] += 1
    tensor.detach().view(-1)[5] = 0
    expected = VALUES * 2
    expected[0] += 1
    expected[1, 2] = 0
    assert torch.equal(tensor, expected)
    assert source.fetched == 1
