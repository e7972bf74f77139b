"""Translates a DeepSpeed configuration: the result for every key, and the equivalent groups and settings.

The classification of single keys is a table, `deepspeed_keys.KEYS`. This module translates values that depend on
several keys (stage and stores, precision, batch, optimizer and scheduler), and finds contradictions.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_zero.migration.classify import AUTO, Classification
from lightning_zero.migration.deepspeed_keys import KEYS
from lightning_zero.migration.deepspeed_training import OPTIMIZERS, SCHEDULERS, TORCH_CLASSES, Target
from lightning_zero.migration.keys import Key
from lightning_zero.migration.located import Document, load
from lightning_zero.migration.report import Import, Row, Status

_HALVES = ("fp16", "bf16", "bfloat16")  # sections of the 16-bit precisions; the last is the old name of the second
_NVME_PARAMS = (
    "host memory (cpu) is written: 2 to 4 bytes per parameter over the ranks must fit there; parameters can rest on "
    "a disk where optimizer state does"
)
_SUFFIXES = {"none": "", "cpu": "_offload", "nvme": "_nvme"}  # of the names of strategies


def import_deepspeed(source: str | Path | Mapping[str, Any], *, ranks: int | None = None) -> Import:
    """Translates a DeepSpeed configuration.

    Args:
        source: a `ds_config.json`, or the dictionary.
        ranks: number of ranks that will train, which splits `train_batch_size`; default: as the file implies, or 1.

    Raises:
        MigrationError: it is not JSON, a value has a wrong type, or settings contradict each other.
        OSError: the file cannot be read.
    """
    return _Translation(load(source), ranks).run()


class _Translation(Classification):
    """Fills an `Import` from the values of a document."""

    def __init__(self, document: Document, ranks: int | None) -> None:
        super().__init__(document)
        self.given_ranks = ranks
        self.mode = ""  # the section that chooses the precision
        self.open_modes: set[str] = set()  # sections that are "auto"
        self.updates_on_host = False

    def run(self) -> Import:
        order = list(self._flatten(self.document.values, ()))
        self._check_names()
        self.number = self._stage()
        self._strategy()
        self._precision()
        self._batch()
        self._optimizer()
        self._scheduler()
        self._reports()
        for path in self.auto:
            if path not in self.rows:
                self._open(path)
        for path, value in self.values.items():
            section = isinstance(value, Mapping) and KEYS[path].computed  # its keys have rows
            if path not in self.rows and not section:
                self._classify(KEYS[path], value)
        self._defaults()
        defaults = [row for path, row in self.rows.items() if path not in order]
        self.result.rows = [self.rows[path] for path in order if path in self.rows] + defaults
        return self.result

    # -- stage and stores -----------------------------------------------------------------------------------------

    def _stage(self) -> int:
        zero = self.values.get("zero_optimization")
        if isinstance(zero, bool):
            number = int(zero)  # DeepSpeed's oldest form
            self._row("zero_optimization", Status.renamed, f"strategy.stage={number}", "the form of long ago")
            return number
        path = "zero_optimization.stage"
        number = int(self.values.get(path, 0))
        if path in self.values:
            self._row(path, Status.kept, "strategy.stage")
        return number

    def _device(self, name: str, *old: str) -> str:
        """Reads the requested place of a store: none, cpu or nvme."""
        device = str(self.values.get(f"zero_optimization.{name}.device", "none")).lower()
        return "cpu" if any(self.values.get(f"zero_optimization.{path}") for path in old) else device

    def _strategy(self) -> None:
        optimizer = self._store("offload_optimizer", ("cpu_offload",), {1, 2, 3})
        params = self._store("offload_param", ("cpu_offload_param", "cpu_offload_params"), {3})
        self.updates_on_host = optimizer != "none"
        result = self.result
        whole = optimizer != "none" and (params == optimizer or self.number < 3)
        result.groups["strategy"] = f"zero{self.number}{_SUFFIXES[optimizer] if whole else ''}"
        if not whole:
            wanted = {"offload_optimizer": optimizer, "offload_params": params}
            result.settings |= {f"strategy.{name}": store for name, store in wanted.items() if store != "none"}
        self._disk(optimizer, params)
        self._fraction(optimizer)

    def _store(self, name: str, old: tuple[str, ...], stages: set[int]) -> str:
        """Makes the rows of a store; returns its place: none, cpu or nvme."""
        device = self._device(name, *old)
        beside_state = name != "offload_param" or self._device("offload_optimizer", "cpu_offload") == "nvme"
        written = device if device != "nvme" or beside_state else "cpu"
        here = KEYS[f"zero_optimization.{name}.device"].here
        paths = [f"zero_optimization.{name}.device", *(f"zero_optimization.{path}" for path in old)]
        for path in filter(self.values.__contains__, paths):
            if device == "none":
                self._row(path, Status.kept, here)
            elif self.values[path] is False:
                self._row(path, Status.kept, note="not used")
            elif self.number not in stages:
                what = "parameters are" if name == "offload_param" else "optimizer state is"
                note = f"at stage {self.number} {what} unsharded on all ranks: use stage {min(stages)}, or leave it out"
                self._row(path, Status.unsupported, note=note)
            elif written != device:
                self._row(path, Status.unsupported, f"{here}={written}", _NVME_PARAMS)
            else:
                self._row(path, Status.renamed if "cpu_offload" in path else Status.kept, f"{here}={written}")
        return written if self.number in stages else "none"

    def _disk(self, optimizer: str, params: str) -> None:
        """Translates the folders of the disk: here parameters rest beside the optimizer state."""
        path, beside = (f"zero_optimization.offload_{store}.nvme_path" for store in ("optimizer", "param"))
        named = [folder for folder in (path, beside) if folder in self.values]
        used = []
        if optimizer == "nvme":
            used = [folder for folder in named if folder == path or params == "nvme"][:1]
            if not used and path not in self.auto:
                note = "the file names no folder; the environment variable LIGHTNING_ZERO_NVME_PATH does as well"
                self._row(path, Status.open, KEYS[path].here, note)
        for folder in used:
            self._set(folder, KEYS[folder].here, self.values[folder])
        for folder in (folder for folder in named if folder not in used):
            rests = "parameters rest beside the optimizer state" if params == "nvme" else "for the device nvme"
            self._row(folder, Status.no_meaning, note=rests)

    def _fraction(self, optimizer: str) -> None:
        """Translates the share of the optimizer state that rests in host memory."""
        path = "zero_optimization.offload_optimizer.ratio"
        value = self.values.get(path)
        if value is None:
            return
        if optimizer == "none":
            self._row(path, Status.no_meaning, note="no optimizer state is offloaded")
        elif value == 1:
            self._row(path, Status.kept, note="as it is here")
        elif value == 0:
            self._row(path, Status.unsupported, note="strategy.offload_optimizer=none offloads nothing")
        else:
            self._set(path, KEYS[path].here, value)

    # -- precision ------------------------------------------------------------------------------------------------

    def _precision(self) -> None:
        """Chooses the precision: DeepSpeed's fp16 and bf16 cast the whole module, as our `-true` modes do."""
        names = {"bfloat16.enabled": "bf16"}
        switches = ("fp16.enabled", "bf16.enabled", "bfloat16.enabled", "amp.enabled", "torch_autocast.enabled")
        on = [path for path in switches if self.values.get(path)]
        self.open_modes = {names.get(path, path.split(".", maxsplit=1)[0]) for path in switches if path in self.auto}
        if len(on) > 1:
            raise self._error(on[1], f"=true and {on[0]}=true exclude each other: set one of them to false.")
        self.mode = names.get(on[0], on[0].split(".")[0]) if on else ""
        group = {"": "fp32", "fp16": "fp16_true", "bf16": "bf16_true", "amp": "fp16"}.get(self.mode, "")
        if self.mode == "torch_autocast":
            half = str(self.values.get("torch_autocast.dtype", "bfloat16")).lower() in ("bfloat16", "bf16")
            group = "bf16" if half else "fp16"
        level = str(self.values.get("amp.opt_level", "O1")).upper()
        if self.mode == "torch_autocast" or (self.mode == "amp" and level == "O1"):
            self.result.settings["precision.param_dtype"] = "float32"
            self.result.sources["precision.param_dtype"] = on[0]
        if self.mode == "amp" and level == "O0":
            group = "fp32"
        if on or not self.open_modes:
            self.result.groups["precision"] = group
        for path in switches:
            if path in self.values:
                status = Status.renamed if self.values[path] else Status.kept
                self._row(path, status, f"precision={group}" if self.values[path] else "")
            elif path in self.auto:
                name = names.get(path, path.split(".", maxsplit=1)[0])
                note = f"Hugging Face's Trainer has it from --{name}; precision={name}_true says it here"
                self._row(path, Status.open, f"precision={group}", note, AUTO)
        for path in ("torch_autocast.dtype", "amp.opt_level"):
            if path in self.values:
                self._row(path, Status.renamed, f"precision={group}")
        self._loss_scale()

    def _loss_scale(self) -> None:
        if self.mode != "fp16":
            return
        path = "fp16.loss_scale"
        if scale := float(self.values.get(path, 0)):
            self.result.groups["precision"] = "fp16_static"
            self.result.settings["precision.precision"] = "16-true"
            self._set(path, "precision.scaler.scale", scale)
        elif path in self.values:
            self._row(path, Status.kept, "precision.scaler", "0: it changes while training")
        positive = {"min_loss_scale": "min_scale", "hysteresis": "hysteresis", "loss_scale_window": "window"}
        for name, ours in positive.items():
            if self.values.get(f"fp16.{name}") == 0:
                note = f"0 is none: precision.scaler.{ours} must be greater than 0, and keeps its default"
                self._row(f"fp16.{name}", Status.unsupported, note=note)

    def _out_of_use(self, key: Key) -> tuple[Status, str] | None:
        """Tells whether the chosen precision makes a key meaningless, and why."""
        section = key.name.split(".", maxsplit=1)[0]
        section = {"bfloat16": "bf16"}.get(section, section)
        is_open = section in self.open_modes
        if section in ("fp16", "bf16") and self.mode != section and not (is_open and key.here):
            return Status.no_meaning, key.moot or f"{section} is not enabled"
        if key.here.startswith("precision.scaler.") and self.values.get("fp16.loss_scale"):
            return Status.no_meaning, "fp16.loss_scale is fixed"
        if not is_open or self.mode == section:
            return None
        value = key.convert(self.values[key.name])
        if key.name != "fp16.loss_scale":
            return Status.open, f"with precision={section}_true: {key.here}={value}"
        if not value:
            return Status.kept, "0: it changes while training"
        return Status.open, (
            f"with precision=fp16_static: precision.precision=16-true precision.scaler.scale={float(value)}"
        )

    # -- batch ----------------------------------------------------------------------------------------------------

    def _batch(self) -> None:
        """Computes those of batch, micro-batch and accumulation that the file leaves out, as DeepSpeed does."""
        names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        for path in names:
            if self.values.get(path) == 0:
                raise self._error(path, "=0 must be at least 1.")
        batch, micro, accumulate = (int(self.values[path]) if path in self.values else None for path in names)
        ranks = self.given_ranks
        if batch and micro and accumulate:
            ranks = self._implied_ranks(batch, micro, accumulate)
        elif batch and not (micro is None and names[1] in self.auto):
            parts = (ranks or 1) * (micro or accumulate or 1)
            if batch % parts:
                given = names[1] if micro else names[2] if accumulate else ""
                each = f" x {given}={parts // (ranks or 1)}" if given else ""
                raise self._error(
                    names[0],
                    f"={batch} cannot be split over {ranks or 1} ranks{each}: "
                    f"use a multiple of {parts}, or another number of ranks.",
                )
            if micro:
                accumulate = batch // parts
            else:
                accumulate = accumulate or 1
                micro = batch // parts
        result = self.result
        result.micro_batch, result.ranks = micro, ranks
        if micro and accumulate is None and names[2] not in self.auto:
            accumulate = 1
        if micro and accumulate:
            result.settings["data.batch_size"] = micro * accumulate * (ranks or 1)
        if accumulate:
            result.settings["trainer.accumulate_grad_batches"] = accumulate
        loose = "" if ranks else "; for 1 rank"
        notes = (f"the samples of a step on all ranks{loose}", "the DataLoader of a rank", "")
        heres = ("data.batch_size", f"DataLoader(batch_size={micro})", f"trainer.accumulate_grad_batches={accumulate}")
        for path, here, note in zip(names, heres, notes, strict=True):
            if path in self.values:
                self._row(path, Status.renamed, here, note)

    def _implied_ranks(self, batch: int, micro: int, accumulate: int) -> int:
        path, parts = "train_batch_size", micro * accumulate
        terms = f"train_micro_batch_size_per_gpu={micro} x gradient_accumulation_steps={accumulate}"
        ranks = self.given_ranks
        if batch % parts:
            raise self._error(
                path,
                f"={batch} is no multiple of {terms}: use {max(1, batch // parts) * parts}, or leave one of them out.",
            )
        if ranks and batch != parts * ranks:
            raise self._error(
                path,
                f"={batch} is not {terms} x {ranks} ranks = {parts * ranks}: "
                f"use {batch // parts} ranks, or leave one of the three out.",
            )
        return batch // parts

    # -- optimizer and scheduler ------------------------------------------------------------------------------------

    def _optimizer(self) -> None:
        path = "optimizer.type"
        name = str(self.values.get(path, "")).lower()
        if "optimizer" not in self.values:
            return
        target = OPTIMIZERS.get(name, Target("adamw"))
        group = target.group
        mode = next((p for p in ("adam_w_mode", "adamw_mode") if f"optimizer.params.{p}" in self.values), "")
        if mode:
            decoupled = self.values[f"optimizer.params.{mode}"] or name != "adam"
            group = group if decoupled else "adam"
            self._row(f"optimizer.params.{mode}", Status.renamed, f"optimizer={group}")
        self.result.groups["optimizer"] = group
        if path in self.values:
            self._type(path, name, group, target, OPTIMIZERS)
        if name == "lion" and not self.updates_on_host:
            note = "Lion's kernel needs its state in host memory: use an offloading strategy; AdamW is written"
            self._row(path, Status.unsupported, note=note)
            self.result.groups["optimizer"], target = "adamw", Target("adamw")
        if self.result.groups["optimizer"] == "lion":
            for path in (f"{half}.{half.replace('bfloat16', 'bf16')}_master_weights_and_grads" for half in _HALVES):
                if self.values.get(path):
                    self._row(path, Status.unsupported, note="Lion's kernel needs fp32 masters, which stay")
        path = "optimizer.params.bias_correction"
        if group == "lamb" and path in self.values:
            corrected = self.values[path]
            note = "optimizer=lamb corrects no moments; scheduler=warmup makes the first steps small"
            self._row(path, Status.unsupported if corrected else Status.kept, note=note if corrected else "")
        if name in TORCH_CLASSES:
            self.result.settings["optimizer._target_"] = f"torch.optim.{TORCH_CLASSES[name]}"
        self._params("optimizer", target)

    def _scheduler(self) -> None:
        path = "scheduler.type"
        name = str(self.values.get(path, "")).lower()
        if "scheduler" not in self.values:
            return
        target = SCHEDULERS.get(name, Target("none"))
        self.result.groups["scheduler"] = target.group
        if path in self.values:
            self._type(path, name, target.group, target, SCHEDULERS)
        if target.group == "cosine":
            self._row(
                path, Status.renamed, "scheduler=cosine", "another curve in the warm-up: a line to lr, without log"
            )
        self._params("scheduler", target)
        if "scheduler.params.warmup_num_steps" in self.auto and "warmup_steps" in target.fields:
            self.result.settings["scheduler.warmup_steps"] = 1
        self._check_schedule()

    def _type(self, path: str, name: str, group: str, target: Target, known: Mapping[str, Target]) -> None:
        section = path.split(".", maxsplit=1)[0]
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            where = "in configure_optimizers" if section == "optimizer" else "with the optimizer"
            note = f"{hint}make it {where}; {section}={group} is written"
            self._row(path, Status.unknown if near else Status.unsupported, note=note)
        elif target.remedy:
            self._row(path, Status.unsupported, f"{section}={group}", target.remedy)
        else:
            here = f"{section}={group}" if group else f"{section}._target_=torch.optim.{TORCH_CLASSES[name]}"
            same = group == name and name != "adam"
            note = (
                "adam_w_mode is true by default: decoupled weight decay"
                if (name, group) == ("adam", "adamw")
                else target.note
            )
            self._row(path, Status.kept if same else Status.renamed, here, note)

    def _params(self, section: str, target: Target) -> None:
        """Drops parameters that the target does not have."""
        for path in [*self.values, *self.auto]:
            key = KEYS[path]
            if not path.startswith(f"{section}.params.") or not key.here.startswith(f"{section}.") or path in self.rows:
                continue
            name = key.here.rpartition(".")[2]
            if name not in target.fields:
                option = target.group or section
                note = f"{section}={option} has no {name!r}" if target.fields else f"{section}={option} is another one"
                self._row(path, Status.unsupported, note=note, value=AUTO)

    def _check_schedule(self) -> None:
        prefix = "scheduler.params."
        low, high = (self.values.get(f"{prefix}warmup_{name}_lr") for name in ("min", "max"))
        if low is not None and high is not None and low > high:
            raise self._error(f"{prefix}warmup_min_lr", f"={low} is above warmup_max_lr={high}: exchange them.")
        warmup, total = (self.values.get(f"{prefix}{name}") for name in ("warmup_num_steps", "total_num_steps"))
        if warmup is not None and total is not None and max(2, warmup) >= total:
            raise self._error(
                f"{prefix}warmup_num_steps",
                f"={warmup} must be less than total_num_steps={total}, of which it is a part.",
            )

    # -- the rest ---------------------------------------------------------------------------------------------------

    def _reports(self) -> None:
        """Chooses loggers and callbacks."""
        groups = self.result.groups
        for section, group in (("csv_monitor", "csv"), ("tensorboard", "tensorboard")):
            on = bool(self.values.get(f"{section}.enabled"))
            if on:
                groups["logger"] = group
            for name in ("enabled", "output_path", "job_name"):
                path = f"{section}.{name}"
                if path not in self.values:
                    continue
                key = KEYS[path]
                if name == "enabled":
                    needs = "it needs: pip install tensorboard" if on and group == "tensorboard" else ""
                    self._row(path, Status.renamed if on else Status.kept, f"logger={group}" if on else "", needs)
                elif on and self.values[path]:
                    self._set(path, key.here, self.values[path])
                else:
                    self._row(path, Status.no_meaning, note=f"{section} is off" if not on else "the default")
        if self.values.get("csv_monitor.enabled") and self.values.get("tensorboard.enabled"):
            for path in [path for path in self.result.settings if path.startswith("logger.csv.")]:
                del self.result.settings[path]
            note = (
                "one logger is written, tensorboard; +logger.csv._target_=lightning.pytorch.loggers.CSVLogger adds it"
            )
            self._row("csv_monitor.enabled", Status.unsupported, note=note)
        for path, group in (("memory_breakdown", "memory"), ("wall_clock_breakdown", "breakdown")):
            if self.values.get(path):
                groups["callbacks"] = group
                self._row(path, Status.renamed, f"callbacks={group}")
            elif path in self.values:
                self._row(path, Status.kept, note="as it is here")
        self._buckets()

    def _buckets(self) -> None:
        """Turns elements of a bucket into MiB; one size serves both directions."""
        whole = self.result.settings.get("precision.param_dtype") == "float32"
        width = 4 if whole or self.result.groups.get("precision", "fp32") == "fp32" else 2
        taken = ""
        for name in ("reduce_bucket_size", "allgather_bucket_size"):
            path = f"zero_optimization.{name}"
            if path not in self.values or not KEYS[path].at(self.number):
                continue
            if not (size := self.values[path]):
                self._row(path, Status.unsupported, note="0 is no size; strategy.bucket_size_mb must be greater than 0")
            elif taken:
                self._row(path, Status.no_meaning, note=f"one size serves both directions: that of {taken}")
            else:
                note = f"elements of {width} bytes; the default here is 25"
                self._set(path, "strategy.bucket_size_mb", max(round(size * width / 2**20, 2), 0.01), note)
                taken = name

    def _defaults(self) -> None:
        """Writes DeepSpeed's defaults for missing settings whose default differs in this package."""
        settings = self.result.settings
        if "gradient_clipping" not in self.auto and "trainer.gradient_clip_val" not in settings:
            note = "not in the file: DeepSpeed clips at 1.0 then. 0: no clipping"
            settings["trainer.gradient_clip_val"] = 1.0
            self.rows["gradient_clipping"] = Row(
                "gradient_clipping", None, Status.renamed, "trainer.gradient_clip_val=1.0", note
            )
        for section, targets in (("optimizer", OPTIMIZERS), ("scheduler", SCHEDULERS)):
            target = targets.get(str(self.values.get(f"{section}.type", "")).lower())
            if target is None or target.group != self.result.groups.get(section):
                continue
            for name, default in target.defaults.items():
                here = f"{section}.{name}"
                path = next(p for p, key in KEYS.items() if key.here == here and ".params." in p)
                if here not in settings and path not in self.auto:
                    settings[here] = default
                    note = "not in the file: DeepSpeed's default"
                    self.rows[path] = Row(path, None, Status.renamed, f"{here}={default}", note)
