"""Small deterministic models, batches and optimizers for the parity tests.

Every model maps tokens to logits over the vocabulary, so that all of them share batches and loss. Sizes are
odd or no powers of two, so that shard borders lie inside parameters. No exact gradient is zero, as that of a key bias
in attention would be, because Adam would turn its rounding errors into steps of the size of the learning rate.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from helpers import whole

VOCAB = 11
WIDTH = 6
LENGTH = 5
FLAG = 0  # as a batch's first token it means: use the optional parameters; no other batch starts with it


class Recomputed(nn.Module):
    """A module whose activations are recomputed in backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any) -> Any:
        return checkpoint(self.block, *args, use_reentrant=False)


class Block(nn.Module):
    """A transformer block; its `adapter`, if any, is used by flagged batches only."""

    def __init__(self, adapter: bool = False) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 13)
        self.down = nn.Linear(13, WIDTH)
        self.adapter = nn.Linear(WIDTH, WIDTH) if adapter else None

    def forward(self, x: Tensor, flagged: bool = False) -> Tensor:
        query, key, value = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        x = x + self.project(functional.scaled_dot_product_attention(query, key, value, is_causal=True))
        x = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return x + self.adapter(x) if self.adapter is not None and flagged else x


class TinyTransformer(nn.Module):
    """Repeated blocks between an embedding and a head with tied weights."""

    def __init__(self, adapter: bool = False, depth: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(adapter) for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        flagged = is_flagged(tokens)
        for block in self.blocks:
            x = block(x, flagged)
        return self.head(self.norm(x))


class MLP(nn.Module):
    """A model without repeated blocks, which is one unit."""

    def __init__(self, first: int = 7, second: int = 5) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(VOCAB, first),
            nn.Tanh(),
            nn.Linear(first, second, bias=False),
            nn.Tanh(),
            nn.Linear(second, VOCAB),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        one_hot = functional.one_hot(tokens, VOCAB).to(self.layers[0].weight.dtype)
        return self.layers(one_hot)


def frozen_transformer() -> TinyTransformer:
    """A transformer whose positions, first block and second block's norms are frozen."""
    model = TinyTransformer()
    for module in (model.positions, model.blocks[0], model.blocks[1].norm1, model.blocks[1].norm2):
        module.requires_grad_(False)
    return model


CONSTRUCTORS: dict[str, Callable[[], nn.Module]] = {
    "transformer": TinyTransformer,
    "mlp": MLP,
    "wide": functools.partial(MLP, 51, 47),  # parameters of several blocks of 8-bit state
    "frozen": frozen_transformer,
    "optional": functools.partial(TinyTransformer, adapter=True),
}


def make_model(name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """Makes a model of `CONSTRUCTORS`; its weights depend on the seed only, except for the rounding to the dtype."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        return CONSTRUCTORS[name]().to(dtype)


def is_flagged(tokens: Tensor) -> bool:
    return bool(tokens[0, 0] == FLAG)


def never(step: int, micro: int, rank: int) -> bool:
    return False


def always(step: int, micro: int, rank: int) -> bool:
    return True


def not_on_rank_0(step: int, micro: int, rank: int) -> bool:
    """Used on all ranks but rank 0; with one rank, never."""
    return rank != 0


def only_in_step_1(step: int, micro: int, rank: int) -> bool:
    return step == 1


def not_in_step_1(step: int, micro: int, rank: int) -> bool:
    return step != 1


def by_turns(step: int, micro: int, rank: int) -> bool:
    """Used on one rank and in one micro-batch, which change from step to step."""
    return (step + micro + rank) % 3 == 0


def make_batches(
    steps: int,
    micro: int,
    world: int,
    seed: int = 0,
    *,
    size: int = 2,
    flagged: Callable[[int, int, int], bool] = never,
) -> list[list[list[Tensor]]]:
    """Makes token batches `[step][micro-batch][rank]`.

    `flagged(step, micro, rank)` tells which of them use the optional parameters.
    """
    generator = torch.Generator().manual_seed(seed)

    def batch(step: int, index: int, rank: int) -> Tensor:
        tokens = torch.randint(1, VOCAB, (size, LENGTH + 1), generator=generator, device="cpu")
        if flagged(step, index, rank):
            tokens[0, 0] = FLAG
        return tokens

    return [[[batch(s, m, r) for r in range(world)] for m in range(micro)] for s in range(steps)]


def rank_batches(batches: Sequence[Sequence[Sequence[Tensor]]], rank: int) -> list[Tensor]:
    """One rank's micro-batches in order, for `DataLoader(..., batch_size=None)`."""
    return [micro[rank] for step in batches for micro in step]


def next_token_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """The mean cross entropy of the predictions of the next tokens."""
    logits = model(batch[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten().to(logits.device))


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "betas": (0.9, 0.95)}),
    "amsgrad": (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
    "adam": (torch.optim.Adam, {"lr": 1e-2}),
    "adamax": (torch.optim.Adamax, {"lr": 1e-2}),
    "nadam": (torch.optim.NAdam, {"lr": 1e-2}),
    "radam": (torch.optim.RAdam, {"lr": 1e-2}),
    "adadelta": (torch.optim.Adadelta, {"lr": 1.0}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-1, "lr_decay": 1e-2}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-2, "momentum": 0.9, "centered": True}),
    "sgd": (torch.optim.SGD, {"lr": 1e-1}),
    "momentum": (torch.optim.SGD, {"lr": 1e-1, "momentum": 0.9}),
    "nesterov": (torch.optim.SGD, {"lr": 1e-1, "momentum": 0.9, "nesterov": True}),
}


def make_optimizer(name: str, model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """Makes an optimizer of `OPTIMIZERS` or `whole.WHOLE` with two groups: only matrices have weight decay.

    Frozen parameters are in the groups too, as is common in user code.
    """
    if name in whole.WHOLE or name in whole.OF_LIBRARIES:
        return whole.make(name, model, **options)
    optimizer, defaults = OPTIMIZERS[name]
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return optimizer(groups, **(defaults | options))


def optimizer_factory(name: str, **options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """`make_optimizer` with all arguments but the model bound."""
    return functools.partial(make_optimizer, name, **options)
