"""Tiny versions of models that users train: of `transformers` and `peft`, built from a config, and plain torch ones.

Every model is called with a batch's items as keywords and returns a mapping with "loss" and "logits". Nothing is
downloaded, dropout is off, and sizes are odd or no powers of two, so that shard borders lie inside parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCAB = 31
LENGTH = 6
CLASSES = 3
IMAGE = 8  # pixels in each direction
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

Batch = dict[str, Tensor]
Batches = list[list[list[Batch]]]  # [step][micro-batch][rank]; there is one micro-batch in each step


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of model: functions that make it and its batches, and its units."""

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    units: tuple[str, ...]

    def make_model(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            return self.build().to(dtype).train()


def tokens(generator: torch.Generator) -> Batch:
    """A batch for a decoder, which predicts each next token."""
    drawn = torch.randint(3, VOCAB, (2, LENGTH), generator=generator)
    return {"input_ids": drawn, "labels": drawn}


def pairs(generator: torch.Generator) -> Batch:
    """A batch for an encoder and a decoder."""
    drawn = torch.randint(3, VOCAB, (2, LENGTH), generator=generator)
    return {"input_ids": drawn, "labels": drawn.flip(1)[:, :4].contiguous()}


def sentences(generator: torch.Generator) -> Batch:
    """A batch for a classifier of texts; one text is shorter than the other."""
    drawn = torch.randint(3, VOCAB, (2, LENGTH), generator=generator)
    mask = torch.ones_like(drawn)
    mask[1, -2:] = 0
    return {"input_ids": drawn, "attention_mask": mask, "labels": torch.randint(CLASSES, (2,), generator=generator)}


def images(generator: torch.Generator) -> Batch:
    """A batch for a classifier of images."""
    pixels = torch.randn(4, 3, IMAGE, IMAGE, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(CLASSES, (4,), generator=generator)}


def make_batches(kind: Kind, steps: int, world: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Batches:
    generator = torch.Generator().manual_seed(seed)

    def batch() -> Batch:
        drawn = kind.batch(generator)
        return {name: v.to(dtype) if v.is_floating_point() else v for name, v in drawn.items()}

    return [[[batch() for _ in range(world)]] for _ in range(steps)]


# ------------------------------------------------------------------------------------------------------- transformers


def gpt2(tied: bool = True) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=16,
        n_embd=18,
        n_layer=3,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=tied,
        **TOKENS,
    )
    return GPT2LMHeadModel(config)


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCAB,
        d_model=18,
        d_kv=5,
        d_ff=21,
        num_layers=2,
        num_heads=3,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        tie_word_embeddings=True,
        **TOKENS,
    )
    return T5ForConditionalGeneration(config)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_llama_sizes(), num_hidden_layers=3))


def _llama_sizes() -> dict[str, int]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": 20,
        "intermediate_size": 28,  # matrix products of experts in one parameter need rows of a multiple of 16 bytes
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 32,
        **TOKENS,
    }


def mixtral() -> nn.Module:
    """A model in which the experts of each layer share one parameter."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    return MixtralForCausalLM(MixtralConfig(**_llama_sizes(), **sizes, output_router_logits=True))


def switch() -> nn.Module:
    """A model in which each expert is a module; the routing leaves some experts unused in most batches."""
    from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

    config = SwitchTransformersConfig(
        vocab_size=VOCAB,
        d_model=18,
        d_kv=5,
        d_ff=13,
        num_layers=2,
        num_decoder_layers=2,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        num_heads=3,
        num_experts=16,
        dropout_rate=0.0,
        router_jitter_noise=0.0,
        decoder_start_token_id=0,
        **TOKENS,
    )
    return SwitchTransformersForConditionalGeneration(config)


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=18,
        intermediate_size=23,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=CLASSES,
        pad_token_id=0,
    )
    return BertForSequenceClassification(config)


def hf_vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=18,
        intermediate_size=23,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=IMAGE,
        patch_size=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=CLASSES,
    )
    return ViTForImageClassification(config)


def lora() -> nn.Module:
    """A frozen GPT-2 with small trainable matrices added to two of its layers, and a trainable copy of its head."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=3,
        target_modules=["c_attn", "c_fc"],
        modules_to_save=["lm_head"],
        fan_in_fan_out=True,
        init_lora_weights=False,  # the usual initial weights include zeros, so that half of the gradients would be zero
        task_type="CAUSAL_LM",
    )
    return get_peft_model(gpt2(tied=False), config)


# -------------------------------------------------------------------------------------------------------- plain torch


class Residual(nn.Module):
    """The basic block of a ResNet."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm2(self.conv2(functional.relu(self.norm1(self.conv1(x)))))
        return functional.relu(inner + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1, bias=False), nn.BatchNorm2d(5), nn.ReLU())
        self.layer1 = nn.Sequential(Residual(5, 5, 1), Residual(5, 5, 1))
        self.layer2 = nn.Sequential(Residual(5, 7, 2), Residual(7, 7, 1))
        self.head = nn.Linear(7, CLASSES)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Batch:
        x = self.layer2(self.layer1(self.stem(pixel_values)))
        logits = self.head(x.mean((2, 3)))
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


class LSTM(nn.Module):
    """A language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 9)
        self.lstm = nn.LSTM(9, 11, num_layers=2, batch_first=True)
        self.head = nn.Linear(11, VOCAB)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Batch:
        hidden, _ = self.lstm(self.embedding(input_ids))
        logits = self.head(hidden)
        return {
            "loss": functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()),
            "logits": logits,
        }


class ViT(nn.Module):
    """With torch's own encoder layers, which read parameters of their attention without calling all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 18, 4, 4)
        self.first = nn.Parameter(torch.randn(1, 1, 18))
        self.positions = nn.Parameter(torch.randn(1, 1 + (IMAGE // 4) ** 2, 18))
        layer = nn.TransformerEncoderLayer(18, 2, 23, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(18, CLASSES)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Batch:
        x = self.patches(pixel_values).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.positions
        logits = self.head(self.encoder(x)[:, 0])
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


def _numbered(count: int, *prefixes: str) -> tuple[str, ...]:
    return tuple(f"{prefix}.{i}" for prefix in prefixes for i in range(count))


KINDS: dict[str, Kind] = {
    "gpt2": Kind(gpt2, tokens, _numbered(3, "transformer.h")),
    "t5": Kind(t5, pairs, _numbered(2, "encoder.block", "decoder.block")),
    "llama": Kind(llama, tokens, _numbered(3, "model.layers")),
    "mixtral": Kind(mixtral, tokens, _numbered(2, "model.layers")),
    "switch": Kind(switch, pairs, _numbered(2, "encoder.block", "decoder.block")),
    "bert": Kind(bert, sentences, _numbered(2, "bert.encoder.layer")),
    "hf_vit": Kind(hf_vit, images, _numbered(2, "vit.layers")),
    "lora": Kind(lora, tokens, _numbered(3, "base_model.model.transformer.h")),
    "resnet": Kind(ResNet, images, _numbered(2, "layer1", "layer2")),
    "lstm": Kind(LSTM, tokens, ()),
    "vit": Kind(ViT, images, _numbered(3, "encoder.layers")),
}
