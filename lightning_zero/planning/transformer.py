"""A decoder-only transformer that is given by its sizes, with activations and operations by published formulas.

Activations are by Korthikanti et al., 2022 (https://arxiv.org/abs/2205.05198): a layer keeps 34 s b h bytes in 16 bits
(without the term of the attention's scores, which flash attention does not keep), a recomputed layer keeps its input,
2 s b h, and the head keeps 4 s b v bytes of logits. Operations are by Chowdhery et al., 2022
(https://arxiv.org/abs/2204.02311, appendix B): 6 per parameter and token, and 12 s h per layer and token for attention;
a third more with recomputation. s: tokens, b: batch, h: width, v: vocabulary.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import Parameter

from lightning_zero.engine import ActivationLimits
from lightning_zero.planning.tracing import Trace
from lightning_zero.sharding.partition import ROOT

_MOST_LAYERS = 10_000  # each is a module of its own


class Sizes(nn.Module):
    """Has parameters of a transformer's sizes, and computes nothing. Make it on the meta device.

    Attention has 4 h^2 parameters per layer. The embedding, which is also the head, has v h; the MLPs have the rest.

    Args:
        params: approximate number of all parameters.
        layers: number of layers.
        hidden: width h.
        vocabulary: number v of different tokens.

    Raises:
        ValueError: the sizes contradict each other.
    """

    def __init__(self, params: int, layers: int, hidden: int, vocabulary: int) -> None:
        super().__init__()
        if layers > _MOST_LAYERS:
            raise ValueError(f"layers={layers} are too many to plan; expected at most {_MOST_LAYERS}")
        for name, value in (("params", params), ("layers", layers), ("hidden", hidden), ("vocabulary", vocabulary)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        rest = params - vocabulary * hidden - layers * 4 * hidden * hidden
        width = rest // (2 * layers * hidden)
        if not hidden // 2 <= width <= 16 * hidden:
            usual = vocabulary * hidden + layers * 12 * hidden * hidden
            raise ValueError(
                f"params={params:.3g} contradicts layers={layers}, hidden={hidden}, vocabulary={vocabulary}: a "
                f"transformer of this shape has about {usual:.3g} parameters"
            )
        self.embedding = Parameter(torch.empty(vocabulary, hidden))
        self.layers = nn.ModuleList(_Layer(hidden, width) for _ in range(layers))


class _Layer(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.attention = nn.ModuleDict(
            {"qkv": nn.Linear(hidden, 3 * hidden, bias=False), "out": nn.Linear(hidden, hidden, bias=False)}
        )
        self.mlp = nn.ModuleDict(
            {"up": nn.Linear(hidden, width, bias=False), "down": nn.Linear(width, hidden, bias=False)}
        )


def trace_of(
    sizes: Sizes, batch: int, sequence: int, wide: bool, recompute: bool, activations: ActivationLimits | None = None
) -> Trace:
    """Returns the formula's activations of one micro-batch as a trace.

    Args:
        sizes: the model.
        batch: number of sequences.
        sequence: number of tokens in a sequence.
        wide: whether activations are fp32, and so twice as large.
        recompute: whether layers are recomputed in backward.
        activations: limits for activations in host memory: all that layers keep except the newest, or at least one
            layer; ``None``: none rest there.
    """
    layers, hidden = len(sizes.layers), sizes.embedding.shape[1]
    tokens = batch * sequence
    unit = tokens * hidden * (2 if wide else 1)
    layer, kept = 34 * unit, 2 * unit if recompute else 34 * unit
    logits = 4 * tokens * sizes.embedding.shape[0]
    params = sum(p.numel() for p in sizes.parameters())
    flops = tokens * (6 * params + 12 * layers * hidden * sequence)

    def held(before: int) -> int:
        """Bytes on the device that ``before`` layers keep."""
        return before * kept if activations is None else min(before * kept, max(activations.window, kept))

    forward = {f"layers.{i}": held(i) + layer for i in range(layers)} | {ROOT: held(layers) + logits}
    backward: dict[str, int] = {}
    for i in reversed(range(layers)):
        names = [name for name, _ in sizes.layers[i].named_parameters()]
        backward |= {f"layers.{i}.{name}": held(i) + layer for name in reversed(names)}
    # The head is assumed to be the embedding, whose gradient is complete last; logits and their gradient come first.
    backward[f"layers.{layers - 1}.mlp.down.weight"] = max(held(layers) + 2 * logits, held(layers - 1) + layer)
    backward["embedding"] = kept
    moved = 0 if activations is None else layers * kept
    copied = {"d2h": moved, "h2d": moved - held(layers) if moved else 0}
    flops = flops * 4 // 3 if recompute else flops
    return Trace(flops, forward, backward, on_host=moved, copied=copied)
