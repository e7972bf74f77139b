"""Muon for matrices and AdamW for the rest, as one optimizer, against torch's two."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import models
from torch import nn

from lightning_zero import Muon


def train(model: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, Any]:
    for (((batch,),),) in ([step] for step in models.make_batches(4, 1, 1)):
        for optimizer in optimizers:
            optimizer.zero_grad()
        models.next_token_loss(model, batch).backward()
        for optimizer in optimizers:
            optimizer.step()
    return model.state_dict()


def test_it_is_torchs_muon_and_torchs_adamw() -> None:
    model = models.make_model("transformer")
    plain, resumed = copy.deepcopy(model), copy.deepcopy(model)
    muon, adamw = (
        {"lr": 0.02, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"},
        {"lr": 0.02, "weight_decay": 0.1, "betas": (0.9, 0.95)},
    )
    hidden, rest = (group["params"] for group in Muon.groups_of(plain))
    assert [name for name, p in plain.named_parameters() if any(p is q for q in rest) and p.dim() == 2] == [
        "tokens.weight",
        "positions.weight",
    ]
    expected = train(plain, torch.optim.Muon(hidden, **muon), torch.optim.AdamW(rest, **adamw))
    one = Muon(Muon.groups_of(model), lr=0.02)
    actual = train(model, one)
    assert all(torch.equal(actual[key], value) for key, value in expected.items())
    again = Muon(Muon.groups_of(resumed), lr=0.5)
    again.load_state_dict(copy.deepcopy(one.state_dict()))
    resumed.load_state_dict(actual)
    assert again.param_groups[0]["lr"] == 0.02
    first, second = train(model, one), train(resumed, again)
    assert all(torch.equal(first[key], value) for key, value in second.items())


def test_groups_are_divided_by_dimensions_unless_they_say_otherwise() -> None:
    model = models.make_model("mlp")
    optimizer = Muon(model.parameters())
    assert [(group["use_muon"], len(group["params"])) for group in optimizer.param_groups] == [(True, 3), (False, 2)]
    assert [group["use_muon"] for group in Muon([{"params": model.parameters(), "use_muon": False}]).param_groups] == [
        False
    ]
    with pytest.raises(ValueError, match=r"use_muon=True needs matrices.*\(7,\)"):
        Muon([{"params": model.parameters(), "use_muon": True}])
    with pytest.raises(ValueError, match="momentum"):
        Muon(model.parameters(), momentum=-1.0)
    with pytest.raises(ValueError, match="beta"):
        Muon(model.parameters(), betas=(0.9, 1.5))
