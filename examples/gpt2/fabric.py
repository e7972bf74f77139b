"""Train GPT-2 with Fabric: the loop is written out, and its loss is bitwise equal to that of train.py.

    python examples/gpt2/fabric.py strategy=zero2_offload trainer.devices=2

The configuration is that of train.py. Of the group `trainer` it takes accelerator, devices, num_nodes, max_steps,
accumulate_grad_batches, val_check_interval, gradient_clip_val and gradient_clip_algorithm, as train.py does.
"""

from pathlib import Path

import lightning as L
import torch
from data import HeldOutWindows, RandomWindows, WindowedData
from hydra.utils import instantiate
from model import LanguageModel
from omegaconf import DictConfig
from options import OF_LOOP, check_options
from rich.progress import Progress

from lightning_zero import hydra_main
from lightning_zero.config import ConfigError, build_fabric, build_optimizers


@hydra_main(config_name="train", config_path="conf")
def main(cfg: DictConfig) -> None:
    """Train and validate, and write a checkpoint from which another run can resume: `ckpt_path=.../last.ckpt`."""
    check_options(cfg, "seed", "ckpt_path", "strategy.start_method", *OF_LOOP)
    if cfg.ckpt_path in ("last", "hpc"):
        raise ConfigError(
            f"ckpt_path={cfg.ckpt_path!r} is a name that only the Trainer knows: give the path of a checkpoint, such "
            "as outputs/.../last.ckpt."
        )
    fabric = build_fabric(cfg)
    fabric.launch()
    L.seed_everything(cfg.seed, verbose=False)
    data = instantiate(cfg.data)
    with fabric.init_module():
        model = instantiate(cfg.model, optimizer=cfg.optimizer, scheduler=cfg.scheduler, _recursive_=False)
    steps = cfg.trainer.max_steps
    built = build_optimizers(cfg.optimizer, cfg.scheduler, model.parameter_groups(), steps)
    scheduler = built["lr_scheduler"]["scheduler"] if "lr_scheduler" in built else None
    sharded, optimizer = fabric.setup(model, built["optimizer"])

    accumulate, rank, world = cfg.trainer.accumulate_grad_batches, fabric.global_rank, fabric.world_size
    windows = RandomWindows(data.train, data.context, data.batch_size, steps, data.seed, rank, world, accumulate)
    state = {"state_dict": sharded, "optimizer": optimizer, "windows": windows, "step": 0}
    state |= {} if scheduler is None else {"scheduler": scheduler}
    if cfg.ckpt_path is not None:
        fabric.load(cfg.ckpt_path, state)

    clip_by = "clip_val" if cfg.trainer.gradient_clip_algorithm == "value" else "max_norm"
    interval = cfg.trainer.val_check_interval or len(windows)
    losses = []  # of the micro-batches of a step
    with Progress(disable=rank > 0) as progress:
        bar = progress.add_task("", total=steps, completed=state["step"])
        for number, batch in zip(range(windows.position + 1, len(windows) + 1), windows, strict=False):
            with fabric.no_backward_sync(sharded, enabled=number % accumulate > 0):
                loss = sharded.training_step(fabric.to_device(batch))
                fabric.backward(loss / accumulate)
            losses.append(loss.detach())
            if number % accumulate == 0:
                if clip := cfg.trainer.gradient_clip_val:
                    fabric.clip_gradients(sharded, optimizer, **{clip_by: clip}, error_if_nonfinite=False)
                skipped = skipped_steps(fabric)
                optimizer.step()
                optimizer.zero_grad()
                if scheduler is not None and skipped_steps(fabric) == skipped:
                    scheduler.step()
                state["step"] += 1
                train_loss = float(fabric.all_reduce(torch.stack(losses).mean(), reduce_op="mean"))
                losses.clear()
                fabric.log("train_loss", train_loss, step=state["step"])
                progress.update(bar, advance=1, description=f"train loss {train_loss:.3f}")
            if number % interval == 0 or number == len(windows):
                val_loss = validate(fabric, sharded, data)
                fabric.log("val_loss", val_loss, step=state["step"])
                if rank == 0:
                    progress.print(f"step {state['step']}: validation loss {val_loss:.6f} nats per token")

    fabric.save(Path(cfg.run_dir) / "last.ckpt", state)
    for logger in fabric.loggers:
        logger.finalize("success")  # it may have rows that are not written yet


def skipped_steps(fabric: L.Fabric) -> int:
    """How many steps were skipped because a gradient was not finite; other strategies do not say it."""
    return getattr(fabric.strategy, "skipped_steps", 0)


@torch.no_grad()
def validate(fabric: L.Fabric, model: LanguageModel, data: WindowedData) -> float:
    """The mean loss over all held-out tokens of all ranks. Collective."""
    ranks = fabric.global_rank, fabric.world_size
    model.eval()
    model.on_validation_epoch_start()
    for batch in HeldOutWindows(data.held_out, data.context, data.val_batch_size, data.val_windows, *ranks):
        model.validation_step(fabric.to_device(batch))
    model.train()
    loss, count = fabric.all_reduce(model._validation, reduce_op="sum")
    return float(loss / count)


if __name__ == "__main__":
    main()
