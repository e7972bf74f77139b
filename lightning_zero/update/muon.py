"""Muon for matrices and AdamW for everything else, as one optimizer."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.update.combined import CombinedOptimizer, GroupRule
from lightning_zero.update.native import ParamGroup
from lightning_zero.update.newton_schulz import BatchedMuon

_MUON = ("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")


class Muon(CombinedOptimizer):
    """Updates matrices as :class:`torch.optim.Muon` and all else as :class:`torch.optim.AdamW`, with the same bits.

    Muon orthogonalizes the momentum of each hidden matrix by a Newton-Schulz iteration
    (https://kellerjordan.github.io/posts/muon/). Embeddings, the output layer, vectors and convolutions are better
    trained by AdamW. :meth:`groups_of` sorts a module's parameters in this way. In a group without ``use_muon``, each
    parameter with two dimensions counts as a matrix.

    When training is sharded, each matrix is whole on one rank, which runs its iteration. Parameters of AdamW's groups
    are cut as usual; if state rests in host memory, the native kernel updates them as in :class:`CPUAdamW`. A rank
    iterates on its matrices of equal shape together (see ``batched``), as far as one update has them.

    Args:
        params: parameters or groups. A group may have an entry ``use_muon``, a bool.
        lr: learning rate of Muon and AdamW.
        weight_decay: decoupled weight decay of Muon and AdamW.
        momentum: momentum of Muon.
        nesterov: whether Muon uses Nesterov's momentum.
        ns_coefficients: coefficients of the Newton-Schulz iteration.
        eps: least norm by which a matrix is divided before Muon's iteration.
        ns_steps: number of iterations.
        adjust_lr_fn: ``"match_rms_adamw"`` scales Muon's steps to the size of AdamW's, so that one learning rate fits
            both (https://arxiv.org/abs/2502.16982); ``"original"`` is torch's default.
        betas: decay rates of AdamW's moments.
        adamw_eps: AdamW's addend to the root of the second moment.
        batched: where matrices of equal shape are iterated on together, by batched products. ``None``: only small ones
            in host memory, if a trial finds that they get the same bits as single ones. ``True``: also on accelerators,
            where bits may then depend on the number of matrices that a rank has. ``False``: nowhere.
        on_device: run the iteration on the model's accelerator if momentum and masters rest in host memory or on a
            disk; matrices are copied there and back in bf16. ``False``: run it on the host. Bits may differ between
            the two.

    Raises:
        ValueError: a hyperparameter is out of range, or a group with ``use_muon=True`` has a parameter that is not a
            matrix.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        batched: bool | None = None,
        on_device: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "betas": betas,
            "adamw_eps": adamw_eps,
            "batched": batched,
            "on_device": on_device,
        }
        # torch's classes check the hyperparameters, with torch's messages.
        matrix = torch.zeros(1, 1, dtype=torch.float32, device="cpu")
        torch.optim.Muon([matrix], **{key: defaults[key] for key in _MUON})  # type: ignore[arg-type]
        torch.optim.AdamW([matrix], lr=lr, betas=betas, eps=adamw_eps, weight_decay=weight_decay)
        super().__init__(params, defaults)

    @staticmethod
    def groups_of(module: nn.Module) -> list[dict[str, Any]]:
        """Sorts the parameters of a module into two groups: hidden matrices for Muon, everything else for AdamW.

        The weights of embeddings go to AdamW, even if they are tied to an output layer. So does the weight of the last
        ``nn.Linear``, which is assumed to be the output layer. A group without parameters is left out.
        """
        modules = list(module.modules())
        outer = {id(m.weight) for m in modules if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
        outer |= {id(m.weight) for m in [m for m in modules if isinstance(m, nn.Linear)][-1:]}
        hidden = [p for p in module.parameters() if p.dim() == 2 and id(p) not in outer]
        chosen = {id(p) for p in hidden}
        rest = [p for p in module.parameters() if id(p) not in chosen]
        groups = [{"params": hidden, "use_muon": True}, {"params": rest, "use_muon": False}]
        return [group for group in groups if group["params"]]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group. Without ``use_muon``, a group with matrices and other parameters becomes two groups.

        Raises:
            ValueError: ``use_muon`` is true, and a parameter is not a matrix.
        """
        given = param_group["params"]
        members = [given] if isinstance(given, Tensor) else list(given)
        matrices = [member for member in members if _parameter(member).dim() == 2]
        if (use_muon := param_group.get("use_muon")) is None:
            matrix_ids = set(map(id, matrices))
            rest = [member for member in members if id(member) not in matrix_ids]
            parts = [part for part in ((matrices, True), (rest, False)) if part[0]]
        else:
            parts = [(members, bool(use_muon))]
        if use_muon and len(matrices) < len(members):
            shape = next(tuple(_parameter(m).shape) for m in members if _parameter(m).dim() != 2)
            raise ValueError(
                f"use_muon=True needs matrices; a parameter of the group has shape {shape}. Leave use_muon out, so "
                "that AdamW updates such parameters, or give them a group with use_muon=False"
            )
        for part, by_muon in parts:
            super().add_param_group(param_group | {"params": part, "use_muon": by_muon})

    def rule_of(self, group: ParamGroup) -> GroupRule:
        if group["use_muon"]:
            own = {key: group[key] for key in _MUON}
            own |= {
                "batched": group.get("batched"),
                "on_device": group.get("on_device", True),
            }  # state dicts of older versions lack them
            return GroupRule(_muon(), own)
        own = {key: group[key] for key in ("lr", "weight_decay", "betas")} | {"eps": group["adamw_eps"]}
        return GroupRule(_adamw(), {**_adamw().defaults, **own})


def _parameter(member: Any) -> Tensor:
    """The parameter of a group's member, which may be a pair of name and parameter."""
    parameter = member[1] if isinstance(member, tuple) else member
    assert isinstance(parameter, Tensor)
    return parameter


@functools.cache
def _muon() -> Optimizer:
    return BatchedMuon([torch.zeros(1, 1, dtype=torch.float32, device="cpu")])


@functools.cache
def _adamw() -> Optimizer:
    return torch.optim.AdamW([torch.zeros(1, dtype=torch.float32, device="cpu")])
