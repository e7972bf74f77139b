"""Remedies for users of Lightning, which complete messages of the lower floors. Importing this module is cheap."""

from __future__ import annotations

from lightning_zero.advice import Case, provide

WEIGHTS_ALONE = (
    "or load the weights alone: model = Model.load_from_checkpoint(path), then trainer.fit(model) without ckpt_path"
)


def provide_advice() -> None:
    """Provide the remedies with which lower floors complete their messages."""
    provide(
        {
            Case.INITIALIZED_IN_SHARDS: (
                "Train it with the Trainer that made it; read or change it, on all ranks, inside `with "
                "trainer.init_module():` or `with lightning_zero.gathered_parameters(module):`. For another strategy "
                "or none, make it an ordinary module with `trainer.strategy.release(module)` on all ranks"
            ),
            Case.FREED: (
                "Use `with lightning_zero.gathered_parameters(module):` on all ranks, around the code that reads it."
            ),
            Case.RANKS_DIFFER: (
                "If they take different ways through the model, gather what they read on all ranks (`with "
                "lightning_zero.gathered_parameters(module):`), or make the module around it one unit "
                "(`units=[...]`)."
            ),
            Case.STATE_IS_SHARDED: (
                "read it with trainer.strategy.optimizer_state(optimizer) on all ranks, or from a checkpoint of the "
                "Trainer"
            ),
            Case.STATE_DOES_NOT_FIT: WEIGHTS_ALONE,
            Case.DAMAGED: "checksums=False in the strategy loads this one nevertheless",
            Case.FOLDER: (
                "A strategy of lightning_zero resumes from the folder: trainer.fit(model, ckpt_path='FOLDER').\n"
                "A strategy that reads one file, such as ddp, fails with IsADirectoryError: write one file for it.\n"
                "The weights alone, without a Trainer: lightning_zero.load_from_checkpoint(Model, 'FOLDER')\n"
            ),
            Case.LOSS_IS_NOT_SCALED: "self.manual_backward(loss) in a LightningModule",
            Case.NOT_FLUSHED: (
                "use self.manual_backward(loss), after which it is; in automatic optimization `on_after_backward` and "
                "`on_before_optimizer_step` come later. If another strategy, such as ddp, trains the module now, call "
                "trainer.strategy.release() of its last Trainer before, on all ranks"
            ),
            Case.NOT_LAST_MICRO_BATCH: "`on_before_optimizer_step` is the place for it",
            Case.STEP_IN_BACKWARD: (
                "in automatic optimization ZeroStrategy(update_in_backward=True) updates parameters during backward"
            ),
            Case.NOT_ON_HOST: "train with an offloading strategy such as strategy='zero2_offload'",
            Case.MASTERS_NOT_ON_HOST: "use offload_optimizer='cpu'",
            Case.MASTERS_NOT_FP32: (
                "Train 16-bit parameters with precision='bf16-true' or '16-true', which gives them fp32 masters"
            ),
            Case.SPLIT_MASTERS: (
                "master_layout='split' is for torch's Adam, AdamW, Adagrad and SGD with offload_optimizer='cpu' or "
                "'nvme'; use master_layout='fp32' with others"
            ),
            Case.RESIDENT_IN_FEWER_DIGITS: "Use offload_fraction=1.0, or the optimizer with its fp32 defaults",
            Case.NEEDS_WHOLE_PARAMETERS: (
                "Give the Trainer all optimizers by `configure_optimizers`, and Fabric the optimizer together with its "
                "module: `fabric.setup(module, optimizer)`"
            ),
            Case.CANNOT_BE_SHARDED: "or train with strategy='ddp'",
            Case.RENORMALIZED_IN_FORWARD: (
                "in `on_train_batch_end`, `with torch.no_grad(), lightning_zero.gathered_parameters(self.{name}): "
                "self.{name}.weight.renorm_({module.norm_type}, 0, {module.max_norm})`"
            ),
            Case.ROUNDED: (
                "Load the weights, `trainer.fit(model, ckpt_path=path)`, or make the module anew; to evaluate first "
                "and train then, use lightning_zero.ZeroStrategy(evaluation_masters=True)"
            ),
            Case.NO_MASTER: (
                "Masters are made, unless master_weights=False, of parameters that the module has in fp32 and that "
                "precision='bf16-true' or another 16-bit precision casts; before any fit only with "
                "lightning_zero.ZeroStrategy(evaluation_masters=True). Or keep such values in fp32 tensors of your own"
            ),
            Case.MADE_LATE: "`__init__` or `configure_model` is the place for it",
            Case.UNEVEN_LOADERS: (
                "Every rank needs the same number of batches: use `drop_last=True` in your own batch sampler, or "
                "Trainer(limit_train_batches=...) with the number of the shortest loader (limit_val_batches, "
                "limit_test_batches or limit_predict_batches in an evaluation)"
            ),
            Case.DISK_PATH: "nvme_path=... must be a folder on a local disk of every node, to which the run may write",
            Case.DISK_FULL: ("Free some of it, or choose another disk by nvme_path; complete checkpoints stay intact"),
            Case.DISK_DAMAGED: (
                "The disk or the memory is faulty: resume from the last checkpoint with another nvme_path"
            ),
            Case.NOT_IN_BACKWARD: "update_in_backward=False makes all updates after backward",
            Case.NOT_PINNED: (
                "or pin less: a smaller staging_buffer_mb or offload_fraction, a larger shard_size, parameters on the "
                "device"
            ),
            Case.SMALLEST_SCALE: "use precision='bf16-mixed' or 'bf16-true'",
            Case.DIFFERENTIABLE: "or use native_optimizer='off'",
            Case.SKIPPED_TOO_OFTEN: "max_consecutive_skips is the limit, None for no limit",
            Case.COMPILED_AS_A_WHOLE: "or make it one unit with units=[{name!r}]",
            Case.TORN: (
                "Resume from the last checkpoint: trainer.fit(model, ckpt_path=path). "
                "ModelCheckpoint(every_n_train_steps=n) writes one every n steps"
            ),
            Case.STEP_OF_ITS_OWN: "or change gradients in `on_before_optimizer_step`",
        }
    )
