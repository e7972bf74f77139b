"""Train GPT-2 with Lightning and any strategy of this package, on this Python's own sources or a text.

    python examples/gpt2/train.py strategy=zero2_offload trainer.devices=2

The default is a model with 0.8 million parameters that predicts bytes. Two CPU cores train it for 2,000 steps in a few
minutes, to a validation loss below 1.9 nats per byte. `--help` lists all options.
"""

import lightning as L
from hydra.utils import instantiate
from omegaconf import DictConfig
from options import check_options
from report import Report

from lightning_zero import hydra_main
from lightning_zero.config import ConfigError, build_trainer, micro_batch_size

SAMPLE = "sample.prompt", "sample.length", "sample.temperature", "sample.top_k"
CHECKED = "seed", "ckpt_path", "strategy.start_method", *SAMPLE


@hydra_main(config_name="train", config_path="conf")
def main(cfg: DictConfig) -> None:
    """Train, validate, and write a plot, a sample and a summary to the run folder."""
    check_options(cfg, *CHECKED)
    L.seed_everything(cfg.seed, verbose=False)
    data = instantiate(cfg.data)
    model = instantiate(cfg.model, optimizer=cfg.optimizer, scheduler=cfg.scheduler, _recursive_=False)
    model.save_hyperparameters({"target": cfg.model._target_, "tokenizer": cfg.data.tokenizer})  # for generate.py

    check_vocabulary(cfg.model.vocab_size, data.tokenizer.vocab_size)
    sampling = {**cfg.sample, "vocab_size": data.tokenizer.vocab_size, "seed": cfg.seed}
    prompt = sampling.pop("prompt")
    report = Report(cfg.run_dir, cfg.strategy_name, data.tokens_per_step, data.tokenizer, prompt, sampling)
    trainer = build_trainer(cfg, callbacks=[report])
    # Check before ranks are started that the batch divides by the ranks and micro-batches.
    micro_batch_size(data.batch_size, trainer.world_size, trainer.accumulate_grad_batches)

    trainer.fit(model, data, ckpt_path=cfg.ckpt_path)
    if report.validated_step != trainer.global_step:
        trainer.validate(model, data, verbose=False)
    report.write(trainer)


def check_vocabulary(model: int, tokenizer: int) -> None:
    """Raise if the model's vocabulary is smaller than the tokenizer's; it may be larger."""
    if model < tokenizer:
        raise ConfigError(
            f"model.vocab_size={model} is less than the {tokenizer} tokens of the tokenizer: "
            f"use model.vocab_size={tokenizer}, or more."
        )


if __name__ == "__main__":
    main()
