"""Shows that a refactor changes no result: compares digests of many short trainings before and after it.

    python -m benchmarks.identity --out before.json
    ... the refactor ...
    python -m benchmarks.identity --out after.json --against before.json

The trainings combine all strategy names, precisions, optimizers, numbers of CPU ranks (one and two), accumulation,
clipping, models, features and checkpoint containers, so that each possible pair of settings occurs at least once. For
each training it keeps a sha256 of

* ``collectives``: every operation on a process group in order, with group, dtype, number of elements and peer;
* ``messages``: the tags of point-to-point messages, which depend on the descriptions of collectives;
* ``norms``: gradient norm, loss scale and skipped steps after every batch;
* ``losses``: the losses of every batch, and of validation;
* ``weights``: the state dict, the parameters in forward, and weights and gradients as user code reads them in training;
* ``states``: the optimizer state;
* ``checkpoint``: all bytes of a checkpoint saved during training and of one saved after it, and the weights loaded
  from the latter.

It prints the names of the trainings that differ and the differing parts, and then exits with 1. ``--trace FOLDER``
writes the hashed data as text, so that ``diff -r`` of two folders finds the first difference. Compare only runs on one
machine with one set of versions, since others may round differently. It uses public names only, and so runs with any
version of the package.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import logging
import os
import random
import re
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader

import lightning_zero
from benchmarks.environment import describe
from benchmarks.identity_model import Model
from benchmarks.recording import Record, Recorder, add_checkpoint, sha256
from lightning_zero.callbacks import EMA

RANKS = 2
TRAININGS = 144
STEPS = 4
MIDDLE = 2  # the step after which a checkpoint is saved during training
TIMEOUT = timedelta(seconds=60)
# One thread, and matrix products that do not depend on the address of a parameter.
REPRODUCIBLE = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_CBWR": "COMPATIBLE",
}

STRATEGIES: dict[str, dict[str, Any]] = {
    "zero0": {"stage": 0},
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero3": {"stage": 3},
    "zero1_offload": {"stage": 1, "offload_optimizer": "cpu"},
    "zero2_offload": {"stage": 2, "offload_optimizer": "cpu"},
    "zero3_offload": {"stage": 3, "offload_optimizer": "cpu", "offload_params": "cpu"},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "small": {"persistence_numel": 0, "bucket_size_mb": 0.01},
    "blocking": {"persistence_numel": 0, "max_live_numel": 0, "check_steps": 0, "native_optimizer": "off"},
    "replicas": {"persistence_numel": 0, "shard_size": 1},
}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "units": {"units": ["FeedForward"]},
    "overflow": {},
    "nonfinite": {},
    "ema": {},
    "async": {"async_save": True},
    "resume": {},
    "reshard": {},
    "no_checksums": {"checksums": False},
}
CLIPPING: dict[str, dict[str, Any]] = {
    "unclipped": {},
    "norm": {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "norm"},
    "value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
}
OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2}),
    "momentum": (torch.optim.SGD, {"lr": 1e-1, "momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {"lr": 5e-2}),
    "cpu_adamw_split": (lightning_zero.CPUAdamW, {"lr": 1e-2, "master_layout": "split"}),
    "cpu_lion_bf16": (lightning_zero.CPULion, {"lr": 1e-3, "state_dtype": torch.bfloat16}),
}
SETTINGS: dict[str, tuple[Any, ...]] = {
    "strategy": tuple(STRATEGIES),
    "precision": ("32-true", "bf16-true", "bf16-mixed", "16-true", "16-mixed"),
    "world_size": (1, 2),
    "optimizer": tuple(OPTIMIZERS),
    "accumulate": (1, 3),
    "clipping": tuple(CLIPPING),
    "model": ("tied", "frozen", "unused", "recomputed", "configured"),
    "feature": tuple(FEATURES),
    "layout": tuple(LAYOUTS),
    "container": ("full", "sharded"),
}


# ------------------------------------------------------------------------------------------------------- the matrix


@dataclasses.dataclass(frozen=True)
class Training:
    """One of the trainings: a value for each of :data:`SETTINGS`."""

    strategy: str
    precision: str
    world_size: int
    optimizer: str
    accumulate: int
    clipping: str
    model: str
    feature: str
    layout: str
    container: str
    rate: float = 1.0  # factor of the learning rate, for the test of this script

    @property
    def name(self) -> str:
        return " ".join(f"{name[0]}{value}" if isinstance(value, int) else value for name, value in self.settings())

    def settings(self) -> list[tuple[str, Any]]:
        return [(name, getattr(self, name)) for name in SETTINGS]

    @property
    def stage(self) -> int:
        stage: int = STRATEGIES[self.strategy]["stage"]
        return stage

    @property
    def valid(self) -> bool:
        fp16 = self.precision.startswith("16")
        return (
            (self.feature != "units" or self.stage == 3)
            and (self.feature != "overflow" or fp16)
            and (self.feature != "nonfinite" or not fp16)
            and (self.layout != "replicas" or (self.stage > 0 and self.world_size > 1))
        )

    def pairs(self) -> set[frozenset[tuple[str, Any]]]:
        return {frozenset(pair) for pair in itertools.combinations(self.settings(), 2)}


def matrix() -> list[Training]:
    """The trainings, the same in every run; every possible pair of settings occurs in one of them.

    After all pairs have occurred, they are combined with other settings until there are :data:`TRAININGS` trainings.
    """
    generator = random.Random(0)
    chosen: dict[Training, None] = {}
    possible = _possible_pairs()
    missing = list(possible)
    covered = False
    while not covered or len(chosen) < TRAININGS:
        candidates = [_sample(generator, dict(missing[0])) for _ in range(40)]
        best = max((c for c in candidates if c not in chosen), key=lambda c: len(c.pairs().intersection(missing)))
        chosen[best] = None
        found = best.pairs()
        missing = [pair for pair in missing if pair not in found]
        if not missing:
            covered, missing = True, list(possible)
    return sorted(chosen, key=lambda training: (training.world_size, training.name))


def _possible_pairs() -> list[frozenset[tuple[str, Any]]]:
    """All pairs of settings that occur in some valid training, in a fixed order."""
    generator = random.Random(0)
    pairs: list[frozenset[tuple[str, Any]]] = []
    for (first, ones), (second, others) in itertools.combinations(SETTINGS.items(), 2):
        for one, other in itertools.product(ones, others):
            try:
                _sample(generator, {first: one, second: other})
            except ValueError:
                continue
            pairs.append(frozenset({(first, one), (second, other)}))
    return pairs


def _sample(generator: random.Random, fixed: Mapping[str, Any]) -> Training:
    for _ in range(1000):
        drawn = {name: generator.choice(values) for name, values in SETTINGS.items()}
        training = Training(**(drawn | dict(fixed)))
        if training.valid:
            return training
    raise ValueError(f"no valid training has {dict(fixed)}")


# -------------------------------------------------------------------------------------------------- what is trained


class Lit(pl.LightningModule):
    def __init__(self, training: Training) -> None:
        super().__init__()
        self.recipe = training
        self.model: Model | None = None
        if training.model != "configured":
            self.configure_model()

    def configure_model(self) -> None:
        if self.model is None:  # Lightning calls this method for every Trainer
            with torch.random.fork_rng(devices=()):
                torch.manual_seed(0)
                self.model = Model(self.recipe.model)

    def loss(self, batch: Tensor) -> Tensor:
        assert self.model is not None
        logits = self.model(batch[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = self.loss(batch)
        last = self.trainer.global_rank == self.trainer.world_size - 1
        if self.recipe.feature == "nonfinite" and last and index // self.recipe.accumulate == 1:
            return loss * float("inf")
        return loss

    def validation_step(self, batch: Tensor, index: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        make, options = OPTIMIZERS[self.recipe.optimizer]
        parameters = list(self.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        optimizer = make(groups, **(options | {"lr": options["lr"] * self.recipe.rate}))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.75)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def train_dataloader(self) -> Any:
        return self._loader(STEPS * self.recipe.accumulate, seed=1)

    def val_dataloader(self) -> Any:
        return self._loader(2, seed=2)

    def _loader(self, count: int, seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        batches = torch.randint(17, (count, self.trainer.world_size, 2, 8), generator=generator)
        return DataLoader(list(batches[:, self.trainer.global_rank]), batch_size=None)


class Watch(pl.Callback):
    """Records a training while it runs, reads the values that users can read, and saves a checkpoint in the middle."""

    def __init__(self, record: Record, path: Path) -> None:
        self._record, self._path = record, path

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step == 0:
            weight = pl_module.model.blocks[0].mix.weight
            self._record.add_tree("weights", "gradient of mix", lightning_zero.full_grad(weight))
            self._record.add_tree("weights", "weight of mix", lightning_zero.full_param(weight))

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, index: int) -> None:
        strategy: Any = trainer.strategy
        self._record.add_tree("losses", f"batch {index}", outputs["loss"])
        norm = strategy.last_grad_norm(trainer.optimizers[0])
        self._record.add("norms", index, norm, strategy.loss_scale, strategy.skipped_steps)
        if index + 1 == MIDDLE * pl_module.recipe.accumulate:
            weight = pl_module.model.blocks[1].mix.weight
            self._record.add_tree("states", "read", lightning_zero.full_optimizer_state(weight))
            trainer.save_checkpoint(self._path)

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._record.add_tree("losses", f"validation {batch_idx}", outputs)


# --------------------------------------------------------------------------------------------------------- training


def make_trainer(training: Training, strategy: str, record: Record, path: Path, **flags: Any) -> pl.Trainer:
    options = LAYOUTS[training.layout] | FEATURES[training.feature]
    if training.container != "full":
        options = options | {"checkpoint_format": training.container}
    if STRATEGIES[strategy]["stage"] == 0:
        options = {name: value for name, value in options.items() if name != "shard_size"}
    callbacks: list[pl.Callback] = [Watch(record, path)]
    if training.feature == "ema":
        callbacks.append(EMA(decay=0.5))
    precision: dict[str, Any] = {"precision": training.precision}
    if training.precision.startswith("16"):  # on a CPU Lightning would make the flag bf16
        scaler = lightning_zero.DynamicLossScaler(init_scale=2.0**12, window=2)
        if training.feature == "overflow":  # two steps are skipped
            scaler = lightning_zero.DynamicLossScaler(init_scale=2.0**30, backoff_factor=2.0**-10, hysteresis=1)
        precision = {"plugins": [lightning_zero.ZeroPrecision(training.precision, scaler=scaler)]}
    return pl.Trainer(
        strategy=lightning_zero.ZeroStrategy(**STRATEGIES[strategy], **options) if options else strategy,
        accelerator="cpu",
        devices=training.world_size,
        max_epochs=1,
        accumulate_grad_batches=training.accumulate,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        limit_val_batches=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        **precision,
        **CLIPPING[training.clipping],
        **flags,
    )


def run(training: Training, folder: Path) -> Record:
    """Train on this rank, which must have a process group of the right size, and record it. Collective."""
    record = Record()
    for seed in (torch.manual_seed, np.random.seed, random.seed):  # for dropout, and for the states in checkpoints
        seed(dist.get_rank())
    with Recorder(record).active():
        if training.feature in ("resume", "reshard"):
            first = training.strategy
            if training.feature == "reshard":
                first = "zero3" if training.stage < 3 else "zero1"
            begun = make_trainer(training, first, record, folder / "begun")
            begun.fit(Lit(training))
            trainer = make_trainer(training, training.strategy, record, folder / "middle")
            module = Lit(training)
            trainer.fit(module, ckpt_path=folder / "begun", weights_only=True)
        else:
            trainer = make_trainer(training, training.strategy, record, folder / "middle")
            module = Lit(training)
            trainer.fit(module)
        trainer.save_checkpoint(folder / "end")
        _add_result(record, trainer, module)
    dist.barrier()
    if dist.get_rank() == 0:
        for path in sorted(folder.iterdir()):
            add_checkpoint(record, path.name, path)
        loaded = lightning_zero.load_from_checkpoint(Lit, folder / "end", training=training)
        record.add_tree("checkpoint", "loaded", loaded.state_dict())
    return record


def _add_result(record: Record, trainer: pl.Trainer, module: Lit) -> None:
    strategy = trainer.strategy
    record.add_tree("weights", "saved", strategy.lightning_module_state_dict())
    for optimizer in trainer.optimizers:
        record.add_tree("states", "saved", strategy.optimizer_state(optimizer))
    with lightning_zero.gathered_parameters(module):
        record.add_tree("weights", "parameters", dict(module.named_parameters()))
        record.add_tree("weights", "buffers", dict(module.named_buffers()))
    record.add("norms", "steps", trainer.global_step, trainer.current_epoch)


def work(number: int, trainings: list[Training], parent: Path) -> None:
    """The program of each process: trainings of one rank are divided among the processes, others run on all of them."""
    quiet()
    for index, training in enumerate(trainings):
        alone = training.world_size == 1
        if alone and index % RANKS != number:
            continue
        rank = 0 if alone else number
        begin(rank, training.world_size, parent / f"store{index}")
        folder = parent / f"checkpoints{index}"
        folder.mkdir(exist_ok=True)
        dist.barrier()
        try:
            record = run(training, folder)
        except BaseException as error:
            error.add_note(f"training {training.name!r}")
            raise
        (parent / f"{index}.rank{rank}.json").write_text(json.dumps(record.parts))
        dist.destroy_process_group()


def quiet() -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)


def begin(rank: int, world_size: int, store: Path) -> None:
    """Make this process a rank of a new world, as a launcher would."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "NODE_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    rank_zero_only.rank = rank
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=TIMEOUT)


# ------------------------------------------------------------------------------------------------------- comparison


def digests(ranks: list[dict[str, list[str]]]) -> dict[str, str]:
    """The sha256 of each part of the records of all ranks."""
    return {part: sha256(json.dumps([record[part] for record in ranks]).encode()) for part in ranks[0]}


def differences(
    before: Mapping[str, Mapping[str, str]], after: Mapping[str, Mapping[str, str]]
) -> dict[str, list[str]]:
    """By name of a training, the parts that differ, or a note that one side lacks the training."""
    found = {}
    for name in {**before, **after}:
        if name not in before or name not in after:
            found[name] = ["only before" if name in before else "only after"]
        elif parts := [p for p in {**before[name], **after[name]} if before[name].get(p) != after[name].get(p)]:
            found[name] = parts
    return found


def train_all(trainings: list[Training], trace: Path | None = None) -> dict[str, dict[str, str]]:
    """Run all trainings and return their digests by name."""
    os.environ |= REPRODUCIBLE  # before the processes that compute start
    result = {}
    with tempfile.TemporaryDirectory(prefix="identity-") as name:
        parent = Path(name)
        mp.start_processes(work, (trainings, parent), nprocs=RANKS, start_method="spawn")
        for index, training in enumerate(trainings):
            files = [parent / f"{index}.rank{rank}.json" for rank in range(training.world_size)]
            records = [json.loads(file.read_text()) for file in files]
            result[training.name] = digests(records)
            for rank, record in enumerate(records if trace is not None else ()):
                assert trace is not None
                lines = [f"{part}: {line}" for part in record for line in record[part]]
                trace.mkdir(parents=True, exist_ok=True)
                (trace / f"{training.name.replace(' ', '-')}.rank{rank}.txt").write_text("\n".join(lines) + "\n")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the digests go")
    parser.add_argument("--against", type=Path, help="digests of before the change")
    parser.add_argument("--only", metavar="PATTERN", default="", help="a regular expression in the trainings' names")
    parser.add_argument("--trace", metavar="FOLDER", type=Path, help="folder to write the hashed data to")
    options = parser.parse_args()
    trainings = [training for training in matrix() if re.search(options.only, training.name)]
    if not trainings:
        parser.error(f"--only {options.only!r} is in no training's name")
    start = time.perf_counter()
    print(f"{len(trainings)} trainings with {Path(lightning_zero.__file__).parent}", flush=True)
    result = {"environment": describe(), "trainings": train_all(trainings, options.trace)}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"took {time.perf_counter() - start:.0f} s", flush=True)
    if options.against is None:
        return
    before = json.loads(options.against.read_text())
    for name in ("cpu", "python", "torch", "lightning"):
        if (was := before["environment"][name]) != (now := result["environment"][name]):
            print(f"{name} was {was}, is {now}: digests may differ for this reason alone")
    expected = {name: parts for name, parts in before["trainings"].items() if re.search(options.only, name)}
    found = differences(expected, result["trainings"])
    for name, parts in found.items():
        print(f"{name}: {', '.join(parts)}")
    counts = Counter(itertools.chain.from_iterable(found.values()))
    print(
        f"{len(found)} of {len(expected)} trainings differ", *(f"{part}: {n}" for part, n in counts.items()), sep="; "
    )
    if found:
        sys.exit(1)


if __name__ == "__main__":
    main()
