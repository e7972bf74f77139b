"""A training script that goes on from its last checkpoint: `train_restarting.py '{"folder": ..., "fail_on": ...}'`."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

import torch
import torch.distributed as dist
from checkpoint.resuming import Resumable
from lightning.pytorch.callbacks import ModelCheckpoint
from strategy.fits import Recipe, make_trainer
from torch import Tensor

from lightning_zero import gathered_parameters

RECIPE = Recipe(optimizer="momentum", steps=4)


class KilledOnce(Resumable):
    """In the third step, the ranks of one node are killed; not after a restart."""

    node = ""

    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        doomed = self.global_step == 2 and socket.gethostname() == self.node
        if doomed and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, index)


def main(folder: str, fail_on: str) -> None:
    torch.set_num_threads(1)
    saving = ModelCheckpoint(dirpath=folder, every_n_train_steps=1, save_last=True)
    trainer = make_trainer(
        {"stage": 3, "persistence_numel": 0, "timeout": 60.0},
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        callbacks=[saving],
        enable_checkpointing=True,
    )
    module = KilledOnce(RECIPE)
    module.node = fail_on
    trainer.fit(module, ckpt_path="last")
    with gathered_parameters(module):
        if trainer.is_global_zero:
            torch.save(module.model.state_dict(), f"{folder}/weights.pt")
            print(f"trained on {dist.get_world_size()} ranks")


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
