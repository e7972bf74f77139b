"""Optimizers that need whole parameters, as users write them, and those of libraries."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero import Muon


class Ruled(Optimizer):
    """Applies `rule` to each parameter with a gradient."""

    def __init__(self, params: Any, lr: float = 1e-2, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def rule(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.rule(parameter, parameter.grad, self.state[parameter], group)
        return loss


class CountsSteps(Ruled):
    """Counts steps in itself."""

    calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        return super().step(closure)


class Lamb(Ruled):
    """Adam's update, scaled by norms of the whole parameter (https://arxiv.org/abs/1904.00962).

    It counts steps in the group.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        return super().step(closure)

    def rule(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state |= {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
        average = state["exp_avg"].lerp_(gradient, 0.1) / (1 - 0.9 ** group["step"])
        square = state["exp_avg_sq"].mul_(0.95).addcmul_(gradient, gradient, value=0.05) / (1 - 0.95 ** group["step"])
        update = average / (square.sqrt() + 1e-6) + group["weight_decay"] * parameter
        ratio = float(parameter.norm()) / max(float(update.norm()), 1e-12)
        parameter.add_(update, alpha=-group["lr"] * (ratio if ratio > 0 else 1.0))


class Shampoo(Ruled):
    """Preconditions matrices from both sides (https://arxiv.org/abs/1802.09568); its state is a list of matrices."""

    def rule(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["step"] = torch.tensor(0.0)
            like = {"dtype": gradient.dtype, "device": gradient.device}
            state["factors"] = [1e-3 * torch.eye(n, **like) for n in gradient.shape]
        state["step"] += 1
        for dim, factor in enumerate(state["factors"]):
            rows = gradient.movedim(dim, 0).reshape(gradient.shape[dim], -1)
            factor.add_(rows @ rows.T)
        update = gradient
        for dim, factor in enumerate(state["factors"]):
            values, vectors = torch.linalg.eigh(factor)
            root = vectors @ torch.diag(values.clamp(min=1e-9) ** (-0.5 / gradient.dim())) @ vectors.T
            update = (
                (root @ update.movedim(dim, 0).reshape(gradient.shape[dim], -1))
                .reshape(update.movedim(dim, 0).shape)
                .movedim(0, dim)
            )
        parameter.add_(update, alpha=-group["lr"] / math.sqrt(float(state["step"])))


def _named(module: str, name: str) -> Callable[..., Optimizer]:
    """The class of a library that need not be installed."""

    def make(params: Any, **options: Any) -> Optimizer:
        return getattr(importlib.import_module(module), name)(params, **options)

    return make


WHOLE: dict[str, tuple[Callable[..., Optimizer], dict[str, Any]]] = {
    "muon": (torch.optim.Muon, {"lr": 2e-2}),
    "muon_and_adamw": (Muon, {"lr": 2e-2, "batched": True}),  # on accelerators, too
    "adafactor": (torch.optim.Adafactor, {"lr": 1e-1}),
    "lamb": (Lamb, {"lr": 1e-2}),
    "shampoo": (Shampoo, {"lr": 1e-2}),
}
OF_LIBRARIES: dict[str, dict[str, Any]] = {
    "transformers.optimization.Adafactor": {
        "lr": 1e-2,
        "scale_parameter": True,
        "relative_step": False,
        "clip_threshold": 0.5,
    },
    "pytorch_optimizer.Lamb": {"lr": 1e-2},
    "pytorch_optimizer.SOAP": {"lr": 1e-2, "precondition_frequency": 1},
    "bitsandbytes.optim.AdamW8bit": {"lr": 1e-2, "min_8bit_size": 64},
    "bitsandbytes.optim.LAMB": {"lr": 1e-2},
}


def groups_of(name: str, model: nn.Module) -> list[dict[str, Any]]:
    """Two groups; Muon takes matrices only, and the rest is frozen."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    rest = [parameter for parameter in model.parameters() if parameter.dim() != 2]
    if name == "muon":
        for parameter in rest:
            parameter.requires_grad_(False)
        return [{"params": matrices[::2], "weight_decay": 0.1}, {"params": matrices[1::2], "weight_decay": 0.0}]
    if name == "muon_and_adamw":
        return Muon.groups_of(model)
    return [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]


def make(name: str, model: nn.Module, **options: Any) -> Optimizer:
    optimizer, defaults = WHOLE[name] if name in WHOLE else (_named(*name.rsplit(".", 1)), OF_LIBRARIES[name])
    return optimizer(groups_of(name, model), **(defaults | options))
