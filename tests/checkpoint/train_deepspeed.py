"""Trains with DeepSpeed on two CPU ranks, and writes its folders beside what they must hold. `python FILE FOLDER`

Needs the extra 'peers', built with DS_BUILD_OPS=0. In FOLDER is `client.pt`, entries that go into every save.
"""

from __future__ import annotations

import functools
import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from strategy.fits import Lit, Recipe
from torch import Tensor

RANKS = 2
SAVED, STEPS = 3, 6
RECIPE = Recipe(model="frozen", steps=STEPS, options={"lr": 0.01})
FP16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}
CASES: dict[str, dict[str, Any]] = {
    "stage1": {"zero_optimization": {"stage": 1}},
    "stage2": {"zero_optimization": {"stage": 2}},
    "stage3": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "sub_group_size": 100}},
    "stage1_bf16": {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}},
    "stage2_fp16": {
        "zero_optimization": {"stage": 2, "round_robin_gradients": True, "parameter_alignment": True},
        "fp16": FP16,
    },
    "stage3_fp16": {"zero_optimization": {"stage": 3}, "fp16": FP16},
}


class Buffered(Lit):
    """Has everything that a folder keeps in a place of its own."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.register_buffer("scale", torch.arange(3.0) / 8)
        self.register_buffer("count", torch.tensor(7))


def train(name: str, folder: Path, client: dict[str, Any]) -> None:
    """One case: `folder/name` as DeepSpeed writes it, and in `folder/name.pt` the values and what came after."""
    import deepspeed

    lit = Buffered(RECIPE)
    lit.forward = functools.partial(lit.training_step, index=0)  # type: ignore[method-assign]
    optimizer = lit.configure_optimizers()
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True}
    engine, *_ = deepspeed.initialize(model=lit, optimizer=optimizer, config=config | CASES[name])
    for step, (micro,) in enumerate(RECIPE.batches(RANKS)):
        if step == SAVED:
            engine.save_checkpoint(str(folder / name), tag="checkpoint", client_state=client)
            saved = full_state(engine)
            scaler = dict(engine.optimizer.loss_scaler.__dict__)
        engine.backward(engine(micro[dist.get_rank()]))
        engine.step()
    after = full_state(engine)
    if dist.get_rank() == 0:
        torch.save({"saved": saved, "after": after, "scaler": scaler}, folder / f"{name}.pt")


def full_state(engine: Any) -> dict[str, dict[str, Tensor]]:
    """What DeepSpeed's optimizer holds of every trainable parameter, whole, from its live tensors. Collective."""
    zero = engine.optimizer
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    found: dict[str, dict[str, Tensor]] = {}
    if hasattr(zero, "fp16_groups"):
        for group, master in zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True):
            ranks = _gathered(master, zero)
            start = 0
            for parameter in group:
                stop = start + parameter.ds_tensor.ds_numel
                found[names[id(parameter)]] = {
                    key: torch.cat([flat[start:stop] for flat in flats])[: parameter.ds_numel].view(parameter.ds_shape)
                    for key, flats in ranks.items()
                }
                start = stop
    else:
        for flat, group, master in zip(
            zero.bit16_groups_flat, zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True
        ):
            whole = {key: torch.cat(flats) for key, flats in _gathered(master, zero).items()}
            for parameter in group:  # each lies in the flat buffer where its master does
                start = (parameter.data_ptr() - flat.data_ptr()) // flat.element_size()
                found[names[id(parameter)]] = {
                    key: values[start : start + parameter.numel()].view(parameter.shape)
                    for key, values in whole.items()
                }
    return {name: {key: value.clone() for key, value in entry.items()} for name, entry in found.items()}


def _gathered(master: Tensor, zero: Any) -> dict[str, list[Tensor]]:
    gathered = {}
    for key, part in {"weight": master.detach(), **zero.optimizer.state[master]}.items():
        if torch.is_tensor(part) and part.dim():
            gathered[key] = [torch.empty_like(part) for _ in range(RANKS)]
            dist.all_gather(gathered[key], part.contiguous())
    return gathered


def work(rank: int, port: int, folder: Path) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "DS_ACCELERATOR": "cpu"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    dist.init_process_group("gloo")
    deepspeed.init_distributed("gloo", dist_init_required=False)
    get_accelerator().is_fp16_supported = lambda: True  # it is, but slow
    client = torch.load(folder / "client.pt", weights_only=True)
    for name in CASES:
        train(name, folder, client)
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = server.getsockname()[1]
    mp.spawn(work, (free, Path(sys.argv[1])), nprocs=RANKS)
