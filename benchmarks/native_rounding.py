"""Measures how far single weights drift apart by rounding alone under Adam, with the native kernel and with torch.

    python -m benchmarks.native_rounding

A convolutional network with batch normalization and a Transformer are trained by torch's AdamW in fp32, by `CPUAdamW`,
by torch's AdamW from weights that all differ by one unit in the last place, and by torch's AdamW in fp64. Two kinds of
numbers are measured: the largest difference between both optimizers in one update from equal parameters, state and
gradients; and at the end of the training the largest difference of a single weight from torch in fp32, over all
parameters and over those whose exact gradient is not zero.

The exact gradient is zero for the bias of a layer before batch normalization, which subtracts the mean, and for the
bias of attention's keys, which adds the same number to all scores of a query. There backward computes rounding errors
only, and since Adam divides a gradient by its own magnitude, it turns them into steps of the size of the learning rate.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from benchmarks.environment import describe
from benchmarks.examples import ROOT
from lightning_zero import CPUAdamW

LR = 1e-3
BATCHES = 8
WITHOUT_GRADIENT = 1e-12  # the exact gradient counts as zero if in fp64 it is below this fraction of the largest one


class Kind(NamedTuple):
    """A model and its batches, inputs and targets, for the mean square error."""

    make: Callable[[], nn.Module]
    inputs: Tensor
    targets: Tensor


def kinds() -> dict[str, Kind]:
    """The models and batches, made from the same seed in every call."""
    torch.manual_seed(0)
    return {
        "convolutions and batch normalization": Kind(
            make_convolutions, torch.randn(BATCHES, 16, 3, 12, 12), torch.randn(BATCHES, 16, 10)
        ),
        "Transformer": Kind(make_transformer, torch.randn(BATCHES, 8, 12, 32), torch.randn(BATCHES, 8, 12, 32)),
    }


def make_convolutions() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 16, 10),
    )


def make_transformer() -> nn.Module:
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def backward(model: nn.Module, kind: Kind, step: int) -> None:
    """Compute the gradients of one batch in the model's parameters."""
    dtype = next(model.parameters()).dtype
    model.zero_grad()
    inputs, targets = kind.inputs[step % BATCHES].to(dtype), kind.targets[step % BATCHES].to(dtype)
    functional.mse_loss(model(inputs), targets).backward()


def torch_adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, foreach=False)


def native_adamw(model: nn.Module) -> Optimizer:
    return CPUAdamW(model.parameters(), lr=LR)


def trained(kind: Kind, model: nn.Module, make: Callable[[nn.Module], Optimizer], steps: int) -> dict[str, Tensor]:
    """Train for `steps` and return the weights in fp64."""
    optimizer = make(model)
    for step in range(steps):
        backward(model, kind, step)
        optimizer.step()
    return {name: parameter.detach().double() for name, parameter in model.named_parameters()}


def one_ulp_away(model: nn.Module) -> nn.Module:
    """Replace every weight by the next greater fp32 number."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.nextafter(parameter, torch.full_like(parameter, torch.inf)))
    return model


def without_gradient(kind: Kind) -> dict[str, Tensor]:
    """Masks of the elements whose gradient for the first batch is zero except for rounding, according to fp64."""
    model = kind.make().double()
    backward(model, kind, 0)
    gradients = {
        name: parameter.grad.abs() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    bound = WITHOUT_GRADIENT * max(float(gradient.max()) for gradient in gradients.values())
    return {name: gradient < bound for name, gradient in gradients.items()}


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor], left_out: dict[str, Tensor] | None = None) -> float:
    """The largest difference of a single weight."""
    differences = {name: (value - b[name]).abs() for name, value in a.items()}
    if left_out is not None:
        differences = {name: value.masked_fill(left_out[name], 0.0) for name, value in differences.items()}
    return max(float(value.max()) for value in differences.values())


def one_update(kind: Kind, steps: int) -> dict[str, float]:
    """The largest difference in one update from equal parameters, state and gradients, over a training by torch."""
    model = kind.make()
    optimizer = torch_adamw(model)
    parameters, moments = 0.0, 0.0
    for step in range(steps):
        backward(model, kind, step)
        other = copy.deepcopy(model)
        for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
            assert theirs.grad is not None
            ours.grad = theirs.grad.clone()
        native = native_adamw(other)
        native.load_state_dict(optimizer.state_dict())
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.step()
        native.step()
        for ours, theirs, old in zip(other.parameters(), model.parameters(), before, strict=True):
            with torch.no_grad():
                size = torch.maximum(theirs.abs(), old.abs())
                ulp = torch.nextafter(size, torch.full_like(size, torch.inf)) - size
                parameters = max(parameters, float(((ours - theirs).abs() / ulp).max()))
            for key in ("exp_avg", "exp_avg_sq"):
                moments = max(moments, float((native.state[ours][key] - optimizer.state[theirs][key]).abs().max()))
    return {"parameters_in_ulps": parameters, "moments": moments}


def measure(kind: Kind, steps: int) -> dict[str, Any]:
    """All numbers for one kind of model."""
    plain = trained(kind, kind.make(), torch_adamw, steps)
    left_out = without_gradient(kind)
    others = {
        "native kernel": trained(kind, kind.make(), native_adamw, steps),
        "torch, weights one ulp away": trained(kind, one_ulp_away(kind.make()), torch_adamw, steps),
        "torch in fp64": trained(kind, kind.make().double(), torch_adamw, steps),
    }
    return {
        "weights": sum(mask.numel() for mask in left_out.values()),
        "weights_without_gradient": sum(int(mask.sum()) for mask in left_out.values()),
        "in_parameters": sorted(name for name, mask in left_out.items() if mask.any()),
        "one_update": one_update(kind, steps),
        "largest_difference_from_torch": {
            name: {"all": largest_difference(plain, other), "others": largest_difference(plain, other, left_out)}
            for name, other in others.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="of each training")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/native_rounding.json")
    options = parser.parse_args()
    result: dict[str, Any] = {"environment": describe(), "steps": options.steps, "lr": LR, "kinds": {}}
    for name, kind in kinds().items():
        result["kinds"][name] = measure(kind, options.steps)
        print(name, json.dumps(result["kinds"][name], indent=2), flush=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
