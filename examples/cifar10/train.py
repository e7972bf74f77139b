"""Train an image classifier on CIFAR-10 with Lightning and any strategy of this package.

    python examples/cifar10/train.py experiment=tutorial strategy=zero2_offload trainer.devices=2

The experiment has the network and the settings of DeepSpeed's tutorial. The data set (162 MB) is downloaded to
`data.root` if that folder does not exist; `data=synthetic` needs no files. `--help` lists all options.
"""

from pathlib import Path

import lightning as L
from hydra.utils import instantiate
from omegaconf import DictConfig
from report import Report

from lightning_zero import hydra_main
from lightning_zero.config import ConfigError, build_trainer, micro_batch_size


@hydra_main(config_name="train", config_path="conf")
def main(cfg: DictConfig) -> None:
    """Train, test, and write pictures and a summary to the run folder."""
    check_options(cfg)
    L.seed_everything(cfg.seed, verbose=False)
    data = instantiate(cfg.data)
    model = instantiate(cfg.model, optimizer=cfg.optimizer, scheduler=cfg.scheduler, _recursive_=False)

    report = Report(cfg.run_dir, cfg.strategy_name, data.batch_size)
    trainer = build_trainer(cfg, callbacks=[report])
    # Check before ranks are started that the batch divides by the ranks and micro-batches.
    micro_batch_size(data.batch_size, trainer.world_size, trainer.accumulate_grad_batches)

    trainer.fit(model, data, ckpt_path=cfg.ckpt_path)
    trainer.test(model, data, ckpt_path=saved_checkpoint(trainer), verbose=False)
    report.write(trainer)


def saved_checkpoint(trainer: L.Trainer) -> str | None:
    """The best checkpoint of a run, or else the last one; None if none was saved, to use the current weights."""
    callback = trainer.checkpoint_callback
    return (callback.best_model_path or callback.last_model_path or None) if callback else None


def check_options(cfg: DictConfig) -> None:
    """Raise for options that would fail only after ranks are started."""
    seed, path, method = cfg.seed, cfg.ckpt_path, cfg.strategy.get("start_method", "popen")
    if type(seed) is not int or not 0 <= seed < 2**32:
        raise ConfigError(f"seed={seed!r} must be an integer from 0 to 4294967295, such as 42: change seed.")
    if path not in (None, "last", "hpc") and "://" not in str(path) and not is_checkpoint(Path(str(path))):
        raise ConfigError(
            f"ckpt_path={path!r} must be an existing file or sharded folder, or null to start anew: change ckpt_path."
        )
    for limit in ("limit_test_batches", "limit_predict_batches"):
        if cfg.trainer.get(limit) == 0:
            raise ConfigError(f"trainer.{limit}=0 leaves nothing to report: set it to 1 or more, or leave it out.")
    if method not in (None, "popen"):
        raise ConfigError(
            f"strategy.start_method={method} keeps the results in the processes that it starts, and this one reports "
            "them: leave strategy.start_method at popen, or start the ranks by torchrun."
        )


def is_checkpoint(path: Path) -> bool:
    """Whether there is a file, or a folder with a sharded checkpoint."""
    return path.is_file() or (path / ".metadata").is_file()


if __name__ == "__main__":
    main()
