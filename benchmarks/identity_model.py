"""The model that :mod:`benchmarks.identity` trains: small, with repeated blocks and every kind of parameter."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        # More elements than stage 3 keeps unsharded by default, and shards that cut through parameters.
        self.up, self.down = nn.Linear(width, 433), nn.Linear(433, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, width: int, adapter: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width, bias=False)
        self.feed = FeedForward(width)
        self.adapter = nn.Linear(width, width) if adapter else None
        self.never = nn.Linear(width, 3) if adapter else None

    def forward(self, x: Tensor, adapted: bool) -> Tensor:
        x = x + functional.dropout(self.mix(self.norm(x)).cumsum(1) / 4, 0.1, self.training)
        x = x + self.feed(x)
        return x + self.adapter(x) if self.adapter is not None and adapted else x


class Model(nn.Module):
    """Embedding, two blocks and a head; what else it has depends on the training's ``model``."""

    def __init__(self, kind: str, vocabulary: int = 17, width: int = 24) -> None:
        super().__init__()
        self.kind = kind
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, adapter=kind == "unused") for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.register_buffer("seen", torch.zeros(()))
        if kind == "tied":
            self.head.weight = self.tokens.weight
        if kind == "frozen":
            for module in (self.tokens, self.blocks[0].norm, self.blocks[1].feed.up):
                module.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen += 1
        x = self.tokens(tokens)
        adapted = bool(tokens[0, 0] % 3 == 0)  # on a rank and in a micro-batch that change
        for block in self.blocks:
            if self.kind == "recomputed" and self.training:
                x = checkpoint(block, x, adapted, use_reentrant=False)
            else:
                x = block(x, adapted)
        return self.head(self.norm(x))
