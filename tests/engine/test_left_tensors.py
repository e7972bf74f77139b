"""Tensors that forward leaves on modules are found, whenever and wherever they appear."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_zero.sharding.left_tensors import LeftTensors


class Gate(nn.Module):
    """Leaves a loss in some forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.losses: list[Tensor] = []
        self.named: dict[str, Any] = {}
        self.loss: Tensor | None = None


class Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(3), Gate(), nn.Sequential(nn.Linear(3, 3), nn.GELU(), nn.Dropout(0.1)))


def all_of(module: nn.Module) -> Iterator[Tensor]:
    """By a walk over everything."""
    for child in module.modules():
        for name, value in vars(child).items():
            if name not in vars(nn.Module()):
                yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def check(left: LeftTensors, module: nn.Module, expected: int) -> None:
    found = {id(tensor) for tensor in left}
    assert found == {id(tensor) for tensor in all_of(module)}
    assert len(found) == expected


def test_what_a_users_module_assigns_in_some_forwards() -> None:
    block = Block()
    left, gate = LeftTensors(block), block[1]
    check(left, block, 0)
    gate.loss = torch.ones(())
    check(left, block, 1)
    gate.loss = None
    check(left, block, 0)
    gate.losses.append(torch.ones(()))
    gate.losses.append(torch.ones(()))
    gate.later = (torch.ones(()), 3)
    check(left, block, 3)
    gate.named.update(z=torch.ones(()), each=[torch.ones(()), {"last": torch.ones(())}])
    check(left, block, 6)
    gate.named.clear()
    gate.losses.clear()
    del gate.later
    gate.loss = torch.zeros(())
    check(left, block, 1)


def test_what_somebody_assigns_to_a_module_of_torch() -> None:
    block = Block()
    left, linear = LeftTensors(block), block[2][0]
    check(left, block, 0)
    linear.auxiliary = torch.ones(())
    check(left, block, 1)
    del linear.auxiliary
    check(left, block, 0)
    linear.auxiliary = [torch.ones(())]
    check(left, block, 1)


def test_an_attribute_that_was_none_on_a_module_of_torch() -> None:
    block = Block()
    block[0].auxiliary = None
    left = LeftTensors(block)
    check(left, block, 0)
    block[0].auxiliary = torch.ones(())
    check(left, block, 1)


def test_modules_that_are_added_and_replaced() -> None:
    block = Block()
    left = LeftTensors(block)
    check(left, block, 0)
    block.append(Gate())
    block[3].loss = torch.ones(())
    check(left, block, 1)
    block[2][1] = Gate()
    block[2][1].loss = torch.ones(())
    check(left, block, 2)


def test_a_weight_that_is_computed_in_forward() -> None:
    """It is an attribute of the name that a parameter had."""
    block = Block()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(block[2][0])
    left = LeftTensors(block)
    block[2](torch.ones(3))
    check(left, block, 1)
    block[2](torch.ones(3))
    check(left, block, 1)
