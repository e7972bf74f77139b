"""Uses the unchanged `GPT2LMHeadModel` of `transformers` instead of the example's own model; any module works."""

from model import LanguageModel, check_dropout, check_sizes
from omegaconf import DictConfig
from torch import Tensor


class HFGPT2(LanguageModel):
    """GPT-2 as `transformers` builds it from a configuration. The arguments are those of `model.GPT`."""

    def __init__(
        self,
        n_layer: int,
        n_head: int,
        n_embd: int,
        context: int,
        vocab_size: int = 256,
        dropout: float = 0.0,
        activation_checkpointing: bool = False,
        optimizer: DictConfig | None = None,
        scheduler: DictConfig | None = None,
    ) -> None:
        super().__init__(context, optimizer, scheduler)
        check_sizes(n_layer=n_layer, n_head=n_head, n_embd=n_embd, context=context, vocab_size=vocab_size)
        check_dropout(dropout)
        try:
            from transformers import GPT2Config, GPT2LMHeadModel
        except ImportError:
            raise ImportError("model=hf_gpt2 needs the package transformers: pip install transformers") from None
        self.save_hyperparameters(ignore=["optimizer", "scheduler"])
        config = GPT2Config(
            n_layer=n_layer,
            n_head=n_head,
            n_embd=n_embd,
            n_positions=context,
            vocab_size=vocab_size,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            bos_token_id=None,
            eos_token_id=None,
            use_cache=False,
        )
        self.save_hyperparameters({"config": config.to_diff_dict()})  # for `lightning-zero export --format hf`
        self.model = GPT2LMHeadModel(config)
        if activation_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of the next token at every position: B T -> B T V."""
        return self.model(tokens).logits
