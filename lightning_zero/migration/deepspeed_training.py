"""DeepSpeed's optimizers and schedulers with their parameters: `TRAINING`, a part of the table of all keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_zero.migration.keys import (
    AMOUNT,
    ANY,
    BETAS,
    BOOL,
    COUNT,
    FRACTION,
    NUMBER,
    TEXT,
    WHOLE,
    Key,
    one_of,
    under,
)


@dataclass(frozen=True)
class Target:
    """The option of a group that an optimizer or a scheduler becomes.

    Attributes:
        group: the option; "" for a class of torch without one.
        fields: its arguments that a configuration may give.
        defaults: DeepSpeed's defaults that differ from those here.
        remedy: of what is not supported: what to do instead. `group` is what is written then.
        note: of what is: how its steps differ.
    """

    group: str
    fields: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    remedy: str = ""
    note: str = ""


_ADAM = frozenset({"lr", "betas", "eps", "weight_decay", "amsgrad", "fused"})
_LAMBS = frozenset({"lr", "betas", "eps", "weight_decay"})
_COMPRESSED = "the update that it approximates is written, AdamW; traffic is not compressed"
_LAMB = (
    "it needs: pip install pytorch-optimizer. Its ratio has no limits but 10 for the norm of the weight, decay is not "
    "in the step whose norm counts, and moments are not corrected (DeepSpeed's first steps take about 0.3 lr)"
)
_MUON = "AdamW is written; optimizer=muon is torch's Muon, whose rates are others than DeepSpeed's"
_SCALED = "scale the lr of parameter groups in configure_optimizers"

# By DeepSpeed's name in lower case. Others are classes of torch.optim, by their own names.
OPTIMIZERS: dict[str, Target] = {
    "adam": Target("adamw", _ADAM, {"weight_decay": 0.0}),  # adam_w_mode is true unless the file says otherwise
    "adamw": Target("adamw", _ADAM, {"weight_decay": 0.0}),
    "adagrad": Target("adagrad", frozenset({"lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps"})),
    "lion": Target("lion", frozenset({"lr", "betas", "weight_decay"}), {"lr": 1e-3, "betas": [0.9, 0.999]}),
    "sgd": Target("sgd", frozenset({"lr", "momentum", "dampening", "weight_decay", "nesterov"})),
    "rmsprop": Target("rmsprop", frozenset({"lr", "alpha", "eps", "weight_decay", "momentum", "centered"})),
    "nadam": Target("", frozenset({"lr", "betas", "eps", "weight_decay"})),
    "radam": Target("", frozenset({"lr", "betas", "eps", "weight_decay"})),
    "adamax": Target("", frozenset({"lr", "betas", "eps", "weight_decay"})),
    "adadelta": Target("", frozenset({"lr", "rho", "eps", "weight_decay"})),
    "asgd": Target("", frozenset({"lr", "weight_decay"})),
    "onebitadam": Target("adamw", _ADAM, {"weight_decay": 0.0}, remedy=_COMPRESSED),
    "zerooneadam": Target("adamw", _ADAM, {"weight_decay": 0.0}, remedy=_COMPRESSED),
    "lamb": Target("lamb", _LAMBS, {"eps": 1e-8}, note=_LAMB),
    "onebitlamb": Target("lamb", _LAMBS, {"eps": 1e-8}, remedy=_COMPRESSED.replace("AdamW", "LAMB")),
    "muon": Target("adamw", remedy=_MUON),
    "muadam": Target("adamw", _ADAM, remedy=_SCALED),
    "muadamw": Target("adamw", _ADAM, remedy=_SCALED),
    "musgd": Target("sgd", frozenset({"lr", "momentum", "weight_decay"}), remedy=_SCALED),
}
# Classes of torch.optim by these names.
TORCH_CLASSES = {"nadam": "NAdam", "radam": "RAdam", "adamax": "Adamax", "adadelta": "Adadelta", "asgd": "ASGD"}

_WARMUP = frozenset({"min_lr", "max_lr", "warmup_steps", "warmup_type"})
SCHEDULERS: dict[str, Target] = {
    "warmuplr": Target("warmup", _WARMUP),
    "warmupdecaylr": Target("warmup_decay", _WARMUP | {"total_steps"}, {"max_lr": 0.001, "warmup_steps": 1000}),
    "warmupcosinelr": Target(
        "cosine",
        frozenset({"total_steps", "warmup_steps", "min_lr_ratio"}),
        {"min_lr_ratio": 0.0001, "warmup_steps": 1000},
    ),
    "onecycle": Target("none", remedy="scheduler=onecycle is torch's OneCycleLR, another curve: give it max_lr"),
    "lrrangetest": Target("none", remedy="lightning.pytorch.callbacks.LearningRateFinder"),
}

_OF_OTHERS = "of an optimizer that is not here"
_OPTIMIZER_PARAMS = (
    Key("lr", AMOUNT, here="optimizer.lr", auto="learning_rate"),
    Key("betas", BETAS, here="optimizer.betas", convert=list, auto="adam_beta1 and adam_beta2"),
    Key("eps", AMOUNT, here="optimizer.eps", auto="adam_epsilon"),
    Key("weight_decay", AMOUNT, here="optimizer.weight_decay", auto="weight_decay"),
    Key("amsgrad", BOOL, here="optimizer.amsgrad"),
    Key("fused", BOOL, here="optimizer.fused"),
    Key("momentum", AMOUNT, here="optimizer.momentum"),
    Key("dampening", NUMBER, here="optimizer.dampening"),
    Key("nesterov", BOOL, here="optimizer.nesterov"),
    Key("alpha", FRACTION, here="optimizer.alpha"),
    Key("centered", BOOL, here="optimizer.centered"),
    Key("rho", FRACTION, here="optimizer.rho"),
    Key("lr_decay", AMOUNT, here="optimizer.lr_decay"),
    Key("initial_accumulator_value", AMOUNT, here="optimizer.initial_accumulator_value"),
    Key("adam_w_mode", BOOL, here="optimizer", computed=True),
    Key("adamw_mode", BOOL, here="optimizer", computed=True),
    Key(
        "torch_adam",
        BOOL,
        moot="torch's class it is; offloaded, native kernels compute it unless native_optimizer='off'",
    ),
    Key("bias_correction", BOOL, as_here=(True,), remedy="moments are always corrected"),
    Key(
        "fp32_optimizer_states",
        BOOL,
        as_here=(True,),
        remedy="optimizer=cpu_adamw optimizer.state_dtype=bfloat16, with an offloading strategy",
    ),
    Key("max_coeff", AMOUNT, remedy="LAMB's ratio has no upper limit here, but 10 for the norm of the weight"),
    Key("min_coeff", AMOUNT, remedy="LAMB's ratio has no lower limit here"),
    Key("eps_inside_sqrt", BOOL, as_here=(False,), remedy="eps is added to the root"),
    Key("max_grad_norm", AMOUNT, here="trainer.gradient_clip_val"),
    Key("set_grad_none", BOOL, moot="gradients are freed after the step"),
    Key("foreach", BOOL, moot="the update runs bucket by bucket"),
    Key("capturable", BOOL, as_here=(False,), remedy="steps are not captured as graphs"),
    Key("differentiable", BOOL, as_here=(False,), remedy="steps are not differentiated"),
    Key("maximize", BOOL, as_here=(False,), remedy="optimizer=cpu_adamw optimizer.maximize=true, offloaded"),
    *(
        Key(name, ANY, remedy=_OF_OTHERS)
        for name in (
            "freeze_step cuda_aware comm_backend_name coeff_beta factor_max factor_min factor_threshold"
            " var_freeze_step var_update_scaler local_step_scaler local_step_clipper muon_lr adam_lr ns_method"
        ).split()
    ),
)

_CURVES = "of a schedule that is not here"
_SCHEDULER_PARAMS = (
    Key("warmup_min_lr", AMOUNT, here="scheduler.min_lr", auto_here="0, as in Hugging Face's Trainer"),
    Key("warmup_max_lr", AMOUNT, here="scheduler.max_lr", auto_here="null, the optimizer's lr"),
    Key(
        "warmup_num_steps",
        COUNT,
        here="scheduler.warmup_steps",
        convert=lambda steps: max(1, int(steps)),
        auto="warmup_steps",
    ),
    Key("warmup_type", one_of("log", "linear"), here="scheduler.warmup_type", convert=str.lower),
    Key("total_num_steps", COUNT, here="scheduler.total_steps", convert=int, auto_here="null, all steps of the fit"),
    Key("cos_min_ratio", FRACTION, here="scheduler.min_lr_ratio"),
    Key("warmup_min_ratio", FRACTION, as_here=(0,), remedy="the warm-up begins at lr / (warmup_steps + 1)"),
    Key("last_batch_iteration", WHOLE, as_here=(-1,), remedy="trainer.fit(ckpt_path=...) goes on at the saved step"),
    *(
        Key(name, ANY, remedy=_CURVES)
        for name in (
            "lr_range_test_min_lr lr_range_test_step_rate lr_range_test_step_size lr_range_test_staircase"
            " cycle_min_lr cycle_max_lr cycle_first_step_size cycle_first_stair_count cycle_second_step_size"
            " cycle_second_stair_count decay_step_size decay_lr_rate cycle_momentum cycle_min_mom cycle_max_mom"
            " decay_mom_rate"
        ).split()
    ),
)

TRAINING: dict[str, Key] = (
    under(
        "optimizer",
        (
            Key("type", TEXT, here="optimizer", computed=True, auto="optim"),
            Key("legacy_fusion", BOOL, moot="fusing is torch's: optimizer.fused"),
        ),
    )
    | under("optimizer.params", _OPTIMIZER_PARAMS)
    | under("scheduler", (Key("type", TEXT, here="scheduler", computed=True, auto="lr_scheduler_type"),))
    | under("scheduler.params", _SCHEDULER_PARAMS)
)
