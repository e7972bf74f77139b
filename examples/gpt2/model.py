"""Language models as LightningModules, and GPT-2: pre-norm blocks, learned positions, tied input and output embeddings.

Shapes in comments: B sequences, T positions, C channels (`n_embd`), H heads, V vocabulary entries.
"""

import math
from contextlib import nullcontext

import lightning as L
import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_zero import Muon
from lightning_zero.config import build_optimizers


class NotFiniteError(ValueError):
    """Raised when text is sampled from a model that has diverged."""


class Attention(nn.Module):
    """Causal self-attention with several heads."""

    def __init__(self, n_embd: int, n_head: int, dropout: float) -> None:
        super().__init__()
        self.n_head = n_head
        self.dropout = dropout
        self.qkv = nn.Linear(n_embd, 3 * n_embd)
        self.proj = nn.Linear(n_embd, n_embd)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)  # B H T C/H
        y = self.proj(y.transpose(1, 2).flatten(-2))  # B T C
        return F.dropout(y, self.dropout, self.training)


class MLP(nn.Module):
    """Two layers with four times the width between them."""

    def __init__(self, n_embd: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.fc = nn.Linear(n_embd, 4 * n_embd)
        self.proj = nn.Linear(4 * n_embd, n_embd)

    def forward(self, x: Tensor) -> Tensor:
        y = self.proj(F.gelu(self.fc(x), approximate="tanh"))  # B T C
        return F.dropout(y, self.dropout, self.training)


class Block(nn.Module):
    """Attention and MLP, each with pre-normalization and added to the residual stream."""

    def __init__(self, n_embd: int, n_head: int, dropout: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd)
        self.attention = Attention(n_embd, n_head, dropout)
        self.ln_2 = nn.LayerNorm(n_embd)
        self.mlp = MLP(n_embd, dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class LanguageModel(L.LightningModule):
    """Training, validation and sampling of a model whose `forward` scores the next token: B T -> B T V.

    Its hyperparameters include `n_layer`, `n_embd`, `context` and `vocab_size`.

    Args:
        context: Longest sequence.
        optimizer: The `optimizer` group; needed to train.
        scheduler: The `scheduler` group; empty or None for a constant learning rate.
    """

    def __init__(self, context: int, optimizer: DictConfig | None = None, scheduler: DictConfig | None = None) -> None:
        super().__init__()
        self.context = context
        self.optimizer_config, self.scheduler_config = optimizer, scheduler
        self._validation = torch.zeros(2)

    def _loss(self, batch: tuple[Tensor, Tensor], reduction: str) -> Tensor:
        tokens, targets = batch
        logits = self(tokens)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # a 16-bit softmax is too imprecise
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = self._loss(batch, "mean")
        if self.fabric is None:  # the loop of fabric.py logs by itself, with its steps
            self.log("train_loss", loss, prog_bar=True, sync_dist=True)  # the mean of the global batch
        return loss

    def on_validation_epoch_start(self) -> None:
        self._validation = torch.zeros(2, dtype=torch.float64, device=self.device)

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        count = (batch[1] >= 0).sum()  # cross_entropy ignores targets of -100
        self._validation += torch.stack([self._loss(batch, "sum").double(), count.double()])

    def on_validation_epoch_end(self) -> None:
        """Sum over the ranks before dividing, to get the mean over all targets even if ranks have different numbers."""
        loss, count = self.trainer.strategy.reduce(self._validation, reduce_op="sum")
        self.log("val_loss", float(loss / count), prog_bar=True, sync_dist=True)

    def parameter_groups(self) -> list[dict]:
        """Groups for weight decay on matrices and none on biases and normalization; Muon updates hidden matrices."""
        matrices = [p for p in self.parameters() if p.ndim >= 2]
        others = {"params": [p for p in self.parameters() if p.ndim < 2], "weight_decay": 0.0}
        if self.optimizer_config is None or self.optimizer_config._target_ != "lightning_zero.Muon":
            return [{"params": matrices}, others]
        hidden, rest = Muon.groups_of(self)
        embeddings = [p for p in rest["params"] if p.ndim >= 2]
        return [hidden, rest | {"params": embeddings}, others | {"use_muon": False}]

    def configure_optimizers(self):
        if self.optimizer_config is None:
            raise ValueError(f"{type(self).__name__}(optimizer=None) cannot be trained: pass the `optimizer` group.")
        steps = self.trainer.estimated_stepping_batches
        return build_optimizers(self.optimizer_config, self.scheduler_config, self.parameter_groups(), steps)

    def flops_per_token(self) -> int:
        """Floating-point operations of matrix products in a forward; as usual, masked attention is counted too."""
        c, t = self.hparams.n_embd, self.hparams.context
        return self.hparams.n_layer * (24 * c * c + 4 * t * c) + 2 * c * self.hparams.vocab_size

    @torch.no_grad()
    def generate(
        self,
        prompt: list[int],
        length: int,
        *,
        temperature: float = 0.8,
        top_k: int | None = None,
        vocab_size: int | None = None,
        seed: int = 0,
    ) -> list[int]:
        """Continue a prompt by `length` sampled tokens; the result is the same on all ranks. Collective.

        Args:
            prompt: Tokens to start from, at least one.
            length: Tokens to sample, each with one forward.
            temperature: Below 1 prefers likely tokens.
            top_k: Sample only from this many of the likeliest tokens; None for all.
            vocab_size: Sample only tokens below this number; None for all.
            seed: Seed of the draws.

        Raises:
            NotFiniteError: The scores of the model are infinite or not a number.
        """
        generator = torch.Generator().manual_seed(seed)
        tokens = list(prompt)
        for _ in range(length):
            window = torch.tensor([tokens[-self.context :]], device=self.device)
            logits = self(window)[0, -1, :vocab_size].float().cpu()  # V
            if not logits.isfinite().all():
                raise NotFiniteError("The model's scores are infinite or not a number: it has diverged.")
            scaled = (logits - logits.max()).double() / temperature  # in fp32 the smallest temperatures overflow
            if top_k is not None and top_k < len(logits):
                scaled[logits < logits.topk(top_k).values[-1]] = -math.inf
            probabilities = torch.softmax(scaled, dim=-1).float()
            tokens.append(int(torch.multinomial(probabilities, 1, generator=generator)))
        return tokens[len(prompt) :]


class GPT(LanguageModel):
    """GPT-2.

    Args:
        n_layer: Number of blocks.
        n_head: Attention heads of a block.
        n_embd: Width of the residual stream.
        context: Longest sequence.
        vocab_size: Number of different tokens; 256 for bytes.
        dropout: Probability of dropping an activation in training.
        activation_checkpointing: Keep only the blocks' inputs, and recompute the other activations in backward.
        activation_offload: Keep these inputs in host memory.
        optimizer: The `optimizer` group; needed to train.
        scheduler: The `scheduler` group; empty or None for a constant learning rate.
    """

    def __init__(
        self,
        n_layer: int,
        n_head: int,
        n_embd: int,
        context: int,
        vocab_size: int = 256,
        dropout: float = 0.0,
        activation_checkpointing: bool = False,
        activation_offload: bool = False,
        optimizer: DictConfig | None = None,
        scheduler: DictConfig | None = None,
    ) -> None:
        super().__init__(context, optimizer, scheduler)
        check_sizes(n_layer=n_layer, n_head=n_head, n_embd=n_embd, context=context, vocab_size=vocab_size)
        check_dropout(dropout)
        check_offload(activation_checkpointing, activation_offload)
        self.save_hyperparameters(ignore=["optimizer", "scheduler"])
        self.dropout = dropout
        self.activation_checkpointing, self.activation_offload = activation_checkpointing, activation_offload

        self.wte = nn.Embedding(vocab_size, n_embd)
        self.wpe = nn.Embedding(context, n_embd)
        self.blocks = nn.ModuleList(Block(n_embd, n_head, dropout) for _ in range(n_layer))
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight
        self._initialize(residual_std=0.02 / math.sqrt(2 * n_layer))

    def _initialize(self, residual_std: float) -> None:
        """GPT-2's initialization, with smaller weights for layers whose results are added to the residual stream."""
        for name, parameter in self.named_parameters():
            if name.endswith("proj.weight"):
                nn.init.normal_(parameter, std=residual_std)
            elif parameter.ndim >= 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of the next token at every position: B T -> B T V."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.wte(tokens) + self.wpe(positions)  # B T C
        x = F.dropout(x, self.dropout, self.training)
        recompute = self.activation_checkpointing and torch.is_grad_enabled()
        for block in self.blocks:
            x = self._recomputed(block, x) if recompute else block(x)
        return self.lm_head(self.ln_f(x))

    def _recomputed(self, block: Block, x: Tensor) -> Tensor:
        with save_on_cpu(pin_memory=x.is_cuda) if self.activation_offload else nullcontext():
            return checkpoint(block, x, use_reentrant=False)


def check_sizes(**sizes: int) -> None:
    """Raise for impossible sizes; `n_embd` and `n_head` must be among them."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"model.{name}={size} must be at least 1: set model.{name} to a positive number.")
    n_embd, n_head = sizes["n_embd"], sizes["n_head"]
    if n_embd % n_head:
        raise ValueError(f"model.n_embd={n_embd} must be a multiple of model.n_head={n_head}: change one.")


def check_dropout(dropout: float) -> None:
    """Raise unless `dropout` is a probability below 1."""
    if not 0 <= dropout < 1:
        raise ValueError(f"model.dropout={dropout} must be at least 0 and below 1, such as 0.1: change model.dropout.")


def check_offload(activation_checkpointing: bool, activation_offload: bool) -> None:
    """Raise if activations are offloaded without checkpointing: all saved tensors would be copied, even weights."""
    if activation_offload and not activation_checkpointing:
        raise ValueError(
            "model.activation_offload=true needs model.activation_checkpointing=true: set both, or neither."
        )
