"""Train GPT-2 with Lightning and any strategy of this package, on this Python's own sources or a text.

    python examples/gpt2/train.py strategy=zero2_offload trainer.devices=2

The default is a model of 0.8 million parameters on bytes. Two CPU cores train its 2,000 steps in a few
minutes, to a validation loss below 1.9 nats per byte. `--help` lists everything that can be changed.
"""

import lightning as L
from data import check_divisible
from hydra.utils import instantiate
from omegaconf import DictConfig
from report import Report

from lightning_zero import hydra_main
from lightning_zero.hydra_app import build_trainer


@hydra_main(config_name="train", config_path="conf")
def main(cfg: DictConfig) -> None:
    """Train, validate, and leave plot, sample and summary in the run folder."""
    L.seed_everything(cfg.seed, verbose=False)
    data = instantiate(cfg.data)
    model = instantiate(cfg.model, optimizer=cfg.optimizer, scheduler=cfg.scheduler, _recursive_=False)

    sampling = {**cfg.sample, "vocab_size": data.vocab_size, "seed": cfg.seed}
    report = Report(cfg.run_dir, cfg.strategy_name, data.tokens_per_step, sampling.pop("prompt"), sampling)
    trainer = build_trainer(cfg, callbacks=[report])
    check_divisible(data.batch_size, trainer.world_size, trainer.accumulate_grad_batches)

    trainer.fit(model, data, ckpt_path=cfg.ckpt_path)
    if report.validated_step != trainer.global_step:
        trainer.validate(model, data, verbose=False)
    report.write(trainer)


if __name__ == "__main__":
    main()
