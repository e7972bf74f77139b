"""A block of GPT, used by the models of `benchmarks.exposed` and `benchmarks.offload`."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Attention and MLP with pre-normalization; maps [batch, tokens, width] to the same shape."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.first(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.second(x)), approximate="tanh"))
