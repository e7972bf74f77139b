"""Activations of a trace without memory, in a plan, against what is measured."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine import driver, memory
from engine.driver import Setup
from helpers import models
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_zero.planning import plan
from lightning_zero.planning.tracing import TraceError, trace
from lightning_zero.sharding import Mesh, MixedPrecisionPolicy

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
WIDTH, HEADS, TOKENS, WORDS, BATCH = 64, 4, 64, 512, 8


class Block(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(-2)
        x = x + self.out(y)
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """As GPT-2: the head is the embedding."""

    def __init__(self, blocks: int = 3, recompute: bool | None = None) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block(True) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.recompute = recompute  # None: keep all; else whether reentrant

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) + self.positions.weight
        for block in self.blocks:
            h = block(h) if self.recompute is None else checkpoint(block, h, use_reentrant=self.recompute)
        return self.head(self.norm(h))


class ViT(nn.Module):
    """Patches of an image, no attention mask, one class per image."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.blocks = nn.ModuleList(Block(False) for _ in range(2))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patches(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            h = block(h)
        return self.head(h.mean(1))


class Experts(nn.Module):
    """Two experts, each of which computes all tokens; a gate weighs them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1).unsqueeze(-2)
        return x + (torch.stack([expert(x) for expert in self.experts], -1) * weights).sum(-1)


class MoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Experts() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h)
        return self.head(h)


class Adapter(nn.Module):
    """A frozen layer and a correction of low rank, which trains."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.down, self.up = nn.Linear(layer.in_features, 4, bias=False), nn.Linear(4, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


def adapted() -> GPT:
    model: Any = GPT(blocks=4).requires_grad_(False)
    for block in model.blocks:
        block.mlp[0] = Adapter(block.mlp[0])
    return model  # type: ignore[no-any-return]


def tokens() -> Tensor:
    return torch.zeros(BATCH, TOKENS, dtype=torch.long)


def images() -> Tensor:
    return torch.zeros(BATCH, 3, 32, 32)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "gpt": (GPT, tokens),
    "checkpointed": (lambda: GPT(recompute=False), tokens),
    "reentrant": (lambda: GPT(recompute=True), tokens),
    "vit": (ViT, images),
    "moe": (MoE, tokens),
    "adapted": (adapted, tokens),
}


def loss_of(model: nn.Module, batch: Tensor, mixed: bool) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed):
        scores = model(batch)
        targets = batch.new_zeros(scores.shape[:-1], dtype=torch.long)
        return F.cross_entropy(scores.float().flatten(0, -2), targets.flatten())


def growth(name: str, stage: int, mixed: bool) -> tuple[float, float]:
    """Held bytes, and what a step takes beyond them, each measured over planned."""
    make, batch = MODELS[name]
    setup = Setup(stage, precision=BF16 if mixed else driver.UNCHANGED, bucket_size_mb=0.1)
    traced = trace(make(), lambda model: loss_of(model, batch(), mixed), setup.precision)
    optimizer = models.optimizer_factory("adamw")
    with memory.only_new_objects():
        model = make()
        expected = plan(
            model, driver.make_placement(setup, Mesh.single()), [optimizer(model)], bucket_size_mb=0.1, trace=traced
        )
        session = driver.start(model, optimizer, setup, Mesh.single())
        del model
        gc.collect()
        with memory.Peak() as peak:
            for _ in range(2):
                driver.run_step(session, [batch()], lambda m, x: loss_of(m, x, mixed))
            session.optimizer.zero_grad()
        held = memory.storage_bytes()
    return held / expected.held.total, (peak.nbytes - held) / (expected.peak.total - expected.held.total)


FEW = [("gpt", 2, True), ("checkpointed", 2, False), ("moe", 3, False)]
MORE = [(name, (0, 3, 2)[n % 3], n % 2 == 0) for n, name in enumerate(MODELS)]  # each stage in either precision


@pytest.mark.parametrize(
    ("name", "stage", "mixed"), [*FEW, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)]
)
def test_the_growth_of_a_step_is_that_of_plan_and_trace(name: str, stage: int, mixed: bool) -> None:
    held, grown = growth(name, stage, mixed)
    print(name, stage, mixed, held, grown)
    assert held == pytest.approx(1, abs=0.01)
    assert grown == pytest.approx(1, abs=0.1)


def test_frozen_parameters_are_sent_as_without_a_trace() -> None:
    model = adapted()
    placement = driver.make_placement(Setup(3), Mesh.imagined(2, 1, 0))
    without, traced = (
        plan(model, placement, [models.optimizer_factory("adamw")(model)], trace=found)
        for found in (None, trace(model, lambda twin: loss_of(twin, tokens(), False)))
    )
    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    assert traced.sent["all_gather"] == without.sent["all_gather"] > frozen / 2


def test_a_module_that_asks_for_values_is_refused() -> None:
    class Asks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x[x.sum(-1) > 0])

    with pytest.raises(TraceError, match="Asks cannot be traced without values"):
        trace(Asks(4, 4), lambda model: model(torch.ones(2, 4)).sum())
    with pytest.raises(TraceError, match="no parameter that requires a gradient"):
        trace(nn.Linear(4, 4).requires_grad_(False), lambda model: model(torch.ones(2, 4)).sum())


def test_a_trace_takes_no_memory_and_changes_nothing() -> None:
    """On meta, with ties, and by the sizes of a model that no machine here holds."""
    with torch.device("meta"):
        model: Any = GPT()
        model.blocks.append(nn.Linear(1 << 17, 1 << 17))  # 64 GiB
    before = [id(p) for p in model.parameters()]
    traced = trace(model, lambda twin: twin.blocks[-1](torch.ones(1, 1 << 17)).sum())
    assert traced.flops == 3 * 2 * (1 << 34) - 2 * (1 << 34)  # no gradient of the input
    assert [id(p) for p in model.parameters()] == before
    assert model.head.weight is model.embed.weight
