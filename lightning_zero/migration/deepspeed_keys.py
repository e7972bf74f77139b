"""All keys of a DeepSpeed 0.19 configuration, classified: one table, `KEYS`.

An entry says one of three things: the setting that takes the value (`here`), why the key has no meaning (`moot`), or
what to do instead (`remedy`). The table includes names that DeepSpeed has deprecated, and names without the prefix that
they have in a file. Optimizers and schedulers with their parameters are in `deepspeed_training`.
"""

from __future__ import annotations

from dataclasses import replace

from lightning_zero.migration.deepspeed_training import TRAINING
from lightning_zero.migration.keys import (
    AMOUNT,
    ANY,
    BOOL,
    COUNT,
    DTYPE,
    FRACTION,
    LIST,
    NUMBER,
    OBJECT,
    TEXT,
    WHOLE,
    Key,
    Kind,
    block,
    one_of,
    under,
)

VERSION = "0.19.8"

STAGE = Kind("0, 1, 2 or 3", lambda value: not isinstance(value, bool) and value in (0, 1, 2, 3))
# Exponents of 2 whose power is a float.
POWER = Kind("a number from -1022 to 1023", lambda value: NUMBER.fits(value) and -1022 <= value <= 1023)
DEVICE = one_of("none", "cpu", "nvme")
_FOR_NVME = "for NVMe: strategy.nvme_buffer_gb bounds the host memory of tiles, their number follows from it"
_PIPELINE = "for NVMe: a tile is updated while the next one is read and the last one written"
_TRANSFERS = "for NVMe: transfers go in blocks by threads of the package's own, past the page cache"
_SWITCH = Kind("an object, or true or false", lambda value: OBJECT.fits(value) or BOOL.fits(value))
_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


def _dtype(word: str) -> str:
    return _DTYPES.get(word.lower(), word.lower())


_BATCH = (
    Key("train_batch_size", COUNT, here="data.batch_size", computed=True, auto="per_device_train_batch_size"),
    Key(
        "train_micro_batch_size_per_gpu",
        COUNT,
        here="DataLoader(batch_size=...)",
        computed=True,
        auto="per_device_train_batch_size",
    ),
    Key(
        "gradient_accumulation_steps",
        COUNT,
        here="trainer.accumulate_grad_batches",
        computed=True,
        auto="gradient_accumulation_steps",
    ),
    Key("managed_gradient_accumulation", BOOL, moot="Lightning counts micro-batches"),
    Key("gradient_clipping", AMOUNT, here="trainer.gradient_clip_val", auto="max_grad_norm"),
    Key("dataloader_drop_last", BOOL, moot="the DataLoader is yours: DataLoader(drop_last=True)"),
)

_COMMUNICATION = (
    Key("communication_data_type", DTYPE, here="precision.reduce_dtype", convert=_dtype),
    Key("seq_parallel_communication_data_type", TEXT, moot="there is no sequence parallelism here"),
    Key("prescale_gradients", BOOL, moot="gradients are divided by the ranks before they are summed"),
    Key("gradient_predivide_factor", NUMBER, moot="gradients are divided by the ranks before they are summed"),
    Key(
        "gradient_allreduce_op",
        one_of("mean", "sum"),
        as_here=("mean",),
        remedy="gradients are averaged; multiply the loss by the number of ranks for a sum",
    ),
    Key("sparse_gradients", BOOL, as_here=(False,), remedy="gradients are dense: nn.Embedding(sparse=False)"),
    Key("disable_allgather", BOOL, moot="an option of DeepSpeed's without ZeRO"),
    Key("fp32_allreduce", BOOL, as_here=(False,), remedy="precision.reduce_dtype=float32"),
    block(
        "comms_logger",
        "enabled prof_all prof_ops verbose debug",
        remedy="callbacks=breakdown measures the time of collectives",
    ),
)

_OBJECTS = (
    Key("zero_optimization", _SWITCH, here="strategy", computed=True),
    Key("fp16", OBJECT, here="precision", computed=True),
    Key("bf16", OBJECT, here="precision", computed=True),
    Key("bfloat16", OBJECT, here="precision", computed=True),
    Key("torch_autocast", OBJECT, here="precision", computed=True),
    Key("amp", OBJECT, here="precision", computed=True),
    Key("data_types", OBJECT, here="precision", computed=True),
    Key("optimizer", OBJECT, here="optimizer", computed=True),
    Key("optimizer.params", OBJECT, here="optimizer", computed=True),
    Key("scheduler", OBJECT, here="scheduler", computed=True),
    Key("scheduler.params", OBJECT, here="scheduler", computed=True),
    Key("activation_checkpointing", OBJECT, here="torch.utils.checkpoint", computed=True),
    Key("tensorboard", OBJECT, here="logger", computed=True),
    Key("csv_monitor", OBJECT, here="logger", computed=True),
    Key("zero_optimization.offload_optimizer", OBJECT, here="strategy", computed=True),
    Key("zero_optimization.offload_param", OBJECT, here="strategy", computed=True),
)

_ZERO = (
    Key("stage", STAGE, here="strategy.stage", computed=True),
    Key("overlap_comm", BOOL, moot="gradients are reduced beside the backward, unless strategy.overlap is false"),
    Key("contiguous_gradients", BOOL, moot="gradients of a bucket are one piece of memory"),
    Key("reduce_scatter", BOOL, moot="gradients are reduce-scattered"),
    Key("allgather_partitions", BOOL, moot="parameters are all-gathered"),
    Key("use_multi_rank_bucket_allreduce", BOOL, moot="a bucket is one collective"),
    Key(
        "reduce_bucket_size",
        COUNT,
        here="strategy.bucket_size_mb",
        stages=frozenset({0, 1, 2}),
        computed=True,
        auto="hidden_size ** 2 of the model",
    ),
    Key(
        "allgather_bucket_size",
        COUNT,
        here="strategy.bucket_size_mb",
        stages=frozenset({0, 1, 2}),
        computed=True,
        auto="hidden_size ** 2 of the model",
    ),
    Key("load_from_fp32_weights", BOOL, moot="checkpoints hold fp32 weights, which are always loaded"),
    Key("elastic_checkpoint", BOOL, moot="checkpoints resume with any number of ranks"),
    Key("legacy_stage1", BOOL, moot="stages 1 and 2 are one code"),
    Key("round_robin_gradients", BOOL, moot="each rank takes its slice of every gradient"),
    Key("ignore_unused_parameters", BOOL, moot="parameters without a gradient are not updated, at every stage"),
    Key("sub_group_size", COUNT, moot="the update runs bucket by bucket"),
    Key("memory_efficient_linear", BOOL, moot="torch's own linear layers are used"),
    Key("pipeline_loading_checkpoint", BOOL, moot="checkpoints are read tensor by tensor"),
    Key("override_module_apply", BOOL, moot="module.apply in configure_model sees full parameters"),
    Key("log_trace_cache_warnings", BOOL, moot="the order of gathers is that of the modules; nothing is invalidated"),
    Key("parameter_alignment", BOOL, moot="updates run at full speed at any address"),
    Key("compute_grad_norm", BOOL, moot="the norm comes with the search for gradients that are not finite"),
    Key("enable_sanity_checks", BOOL, moot="ranks compare notes in the first steps: strategy.check_steps"),
    Key("save_muon_momentum_buffer_in_memory", BOOL, as_here=(False,), remedy="Muon's rests with all state"),
    block("leaf_module", "classes names name_suffixes", switched=False, moot="a repeated block is gathered as a whole"),
    Key("grad_hooks", BOOL, moot="gradients are reduced during backward"),
    Key("verbose", BOOL, moot="there is no such log"),
    Key("allgather_size", COUNT, moot="the name before allgather_bucket_size, of long ago"),
    Key("max_elements_per_comm", COUNT, moot="an option of a stage 1 of long ago"),
)

_AT_STAGE_3 = (
    Key(
        "stage3_max_live_parameters",
        COUNT,
        here="strategy.max_live_numel",
        convert=int,
        note="a cap on what is gathered ahead",
    ),
    Key(
        "stage3_param_persistence_threshold",
        COUNT,
        here="strategy.persistence_numel",
        convert=int,
        auto="10 * hidden_size of the model",
    ),
    Key("stage3_prefetch_bucket_size", COUNT, moot="one unit is gathered ahead; strategy.prefetch_mb: more"),
    Key("stage3_max_reuse_distance", COUNT, moot="a unit is freed after its forward and gathered for its backward"),
    Key(
        "stage3_model_persistence_threshold",
        COUNT,
        remedy="there is no cap on their sum: lower strategy.persistence_numel",
    ),
    Key(
        "stage3_gather_16bit_weights_on_model_save",
        BOOL,
        moot="checkpoints hold full fp32 weights; lightning-zero export --dtype bf16 writes 16-bit ones",
    ),
    Key("stage3_module_granularity_threshold", COUNT, moot="a repeated block is gathered as a whole; strategy.units"),
    Key("stage3_use_all_reduce_for_fetch_params", BOOL, moot="parameters are all-gathered"),
    Key("stage3_allgather_sequential", BOOL, moot="a unit is one collective"),
)

_ZEROPP = (
    Key(
        "zero_hpz_partition_size",
        COUNT,
        as_here=(0, 1),
        remedy="strategy.shard_size shards everything over so many ranks (default: those of a node)",
    ),
    Key("zero_quantized_weights", BOOL, as_here=(False,), remedy="traffic is not quantized: precision=bf16_true"),
    Key("zero_quantized_nontrainable_weights", BOOL, as_here=(False,), remedy="traffic is not quantized"),
    Key("zero_quantized_gradients", BOOL, as_here=(False,), remedy="precision.reduce_dtype=bfloat16 is the smallest"),
    Key("zeropp_loco_param", OBJECT, remedy="traffic is not quantized, so there is no error to feed back", inside=None),
    Key("mics_shard_size", WHOLE, here="strategy.shard_size", as_here=(-1,), stages=frozenset({1, 2, 3})),
    Key("mics_hierarchical_params_gather", BOOL, moot="inside a node there is one level"),
    block(
        "zenflow",
        "topk_ratio select_strategy select_interval update_interval overlap_step offload auto_ratio full_warm_up_rounds"
        " pt_reserved_cores_perc steps_per_epoch",
        switched=False,
        remedy="offloading is exact here: every gradient counts in its own step",
    ),
)

# DeepSpeed takes these with and without the prefix.
_SHORT = tuple(replace(key, name=key.name.removeprefix("stage3_")) for key in _AT_STAGE_3)

_DEPRECATED = (
    Key("cpu_offload", BOOL, here="strategy.offload_optimizer", computed=True),
    Key("cpu_offload_param", BOOL, here="strategy.offload_params", stages=frozenset({3}), computed=True),
    Key("cpu_offload_params", BOOL, here="strategy.offload_params", stages=frozenset({3}), computed=True),
    Key("cpu_offload_use_pin_memory", BOOL, moot="what crosses is pinned where ranks have GPUs"),
    Key(
        "stage3_gather_fp16_weights_on_model_save",
        BOOL,
        moot="checkpoints hold full fp32 weights; lightning-zero export --dtype fp16 writes 16-bit ones",
    ),
)

_OFFLOAD = (
    Key("buffer_count", COUNT, moot=_FOR_NVME),
    Key("pin_memory", BOOL, moot="what crosses is pinned where ranks have GPUs"),
)
_OFFLOAD_OPTIMIZER = (
    Key("device", DEVICE, here="strategy.offload_optimizer", computed=True),
    Key("nvme_path", TEXT, here="strategy.nvme_path", computed=True),
    *_OFFLOAD,
    Key("pipeline", BOOL, moot=_PIPELINE),
    Key("pipeline_read", BOOL, moot=_PIPELINE),
    Key("pipeline_write", BOOL, moot=_PIPELINE),
    Key("fast_init", BOOL, moot="for NVMe: masters are written tile by tile as they are made"),
    Key("ratio", FRACTION, here="strategy.offload_fraction", computed=True),
    Key("super_offload", BOOL, as_here=(False,), remedy="the update is exact and waits for clipping"),
    Key(
        "cpuadam_cores_perc",
        FRACTION,
        moot="the ranks of a machine share its cores; LIGHTNING_ZERO_NUM_THREADS limits them",
    ),
)
_OFFLOAD_PARAM = (
    Key("device", DEVICE, here="strategy.offload_params", computed=True),
    Key("nvme_path", TEXT, here="strategy.nvme_path", computed=True),
    *_OFFLOAD,
    Key("buffer_size", COUNT, moot=_FOR_NVME),
    Key("max_in_cpu", COUNT, moot=_FOR_NVME),
)

_FP16 = (
    Key("enabled", BOOL, here="precision", computed=True, auto="fp16"),
    Key("loss_scale", AMOUNT, here="precision.scaler", computed=True),
    Key(
        "initial_scale_power",
        POWER,
        here="precision.scaler.init_scale",
        convert=lambda power: 2.0**power,
    ),
    Key("loss_scale_window", COUNT, here="precision.scaler.window", convert=int),
    Key("hysteresis", COUNT, here="precision.scaler.hysteresis", convert=int),
    Key("min_loss_scale", AMOUNT, here="precision.scaler.min_scale", convert=float),
    Key("consecutive_hysteresis", BOOL, here="precision.scaler.consecutive_hysteresis"),
    Key("auto_cast", BOOL, moot="floating-point inputs are cast; precision.cast_inputs=false leaves them"),
    Key("fp16_master_weights_and_grads", BOOL, here="precision.master_weights", convert=lambda without: not without),
)
_BF16 = (
    Key("enabled", BOOL, here="precision", computed=True, auto="bf16"),
    Key("immediate_grad_update", BOOL, moot="gradients are reduced during backward"),
    Key("check_grad_overflow", BOOL, here="strategy.skip_nonfinite"),
    Key("bf16_master_weights_and_grads", BOOL, here="precision.master_weights", convert=lambda without: not without),
    Key("bf16_optimizer_states", BOOL, moot="without masters, state has the parameters' dtype"),
)
_PRECISION = (
    under("fp16", _FP16)
    | under("bf16", _BF16)
    | under("bfloat16", _BF16)
    | under(
        "torch_autocast",
        (
            Key("enabled", BOOL, here="precision", computed=True),
            Key("dtype", DTYPE, here="precision", computed=True),
            Key("lower_precision_safe_modules", LIST, moot="autocast has torch's own list of operations"),
        ),
    )
    | under(
        "amp",
        (
            Key("enabled", BOOL, here="precision", computed=True, auto="fp16"),
            Key("opt_level", one_of("o0", "o1", "o2", "o3"), here="precision", computed=True, auto="fp16_opt_level"),
            Key("loss_scale", ANY, moot="the loss scaler is lightning_zero's: precision.scaler"),
        ),
    )
    | under(
        "data_types",
        (
            Key("grad_accum_dtype", DTYPE, here="precision.grad_dtype", convert=_dtype),
            Key("param_dtype", DTYPE, here="precision.param_dtype", convert=_dtype),
            Key(
                "keep_in_fp32_modules",
                LIST,
                as_here=([],),
                remedy="precision=bf16 and fp16 leave buffers as they are; bf16_true and fp16_true cast all of them",
            ),
            Key("buffer_dtype", DTYPE, remedy="module.float() or .bfloat16() on the buffers in configure_model"),
        ),
    )
)

_CHECKPOINTS = "partitioned activations are for model parallelism; strategy.activation_offload=true saves device memory"
_ACTIVATIONS = (
    Key("partition_activations", BOOL, as_here=(False,), remedy=_CHECKPOINTS),
    Key("contiguous_memory_optimization", BOOL, as_here=(False,), remedy=_CHECKPOINTS),
    Key(
        "cpu_checkpointing",
        BOOL,
        as_here=(False,),
        remedy="strategy.activation_offload=true, which moves the inputs of checkpointed blocks beside the training",
    ),
    Key("number_checkpoints", COUNT, moot="torch.utils.checkpoint needs no number"),
    Key("synchronize_checkpoint_boundary", BOOL, moot="torch.utils.checkpoint waits for nothing"),
    Key("profile", BOOL, as_here=(False,), remedy="callbacks=breakdown measures forward and backward"),
)

_MONITORS = (
    under(
        "tensorboard",
        (
            Key("enabled", BOOL, here="logger", computed=True),
            Key("output_path", TEXT, here="logger.tensorboard.save_dir", computed=True),
            Key("job_name", TEXT, here="logger.tensorboard.name", computed=True),
        ),
    )
    | under(
        "csv_monitor",
        (
            Key("enabled", BOOL, here="logger", computed=True),
            Key("output_path", TEXT, here="logger.csv.save_dir", computed=True),
            Key("job_name", TEXT, here="logger.csv.name", computed=True),
        ),
    )
    | under(
        "",
        (
            block(
                "wandb",
                "enabled group team project",
                remedy="+logger.wandb._target_=lightning.pytorch.loggers.WandbLogger",
            ),
            block(
                "comet",
                "enabled samples_log_interval project workspace api_key experiment_name experiment_key online mode",
                remedy="+logger.comet._target_=lightning.pytorch.loggers.CometLogger",
            ),
        ),
    )
)

_REPORTS = (
    Key("steps_per_print", ANY, moot="the progress bar reports; loggers write every trainer.log_every_n_steps"),
    Key("wall_clock_breakdown", BOOL, here="callbacks", computed=True),
    Key("memory_breakdown", BOOL, here="callbacks", computed=True),
    Key("dump_state", BOOL, moot="lightning-zero inspect shows what a checkpoint holds"),
    Key("log_level", TEXT, moot="logging.getLogger('lightning') sets it"),
    Key("vocabulary_size", COUNT, moot="it only warns of a size that is no multiple of 8"),
    block(
        "flops_profiler",
        "enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file",
        remedy="torch.utils.flop_counter.FlopCounterMode, or callbacks=breakdown for the time",
    ),
    block("timers", "throughput", switched=False, moot="the examples' RunReport measures speed"),
)

_OTHER = (
    block(
        "aio",
        "block_size queue_depth intra_op_parallelism thread_count single_submit overlap_events use_gds",
        switched=False,
        moot=_TRANSFERS,
    ),
    Key(
        "zero_allow_untested_optimizer",
        BOOL,
        moot="what updates each parameter by itself runs, others are refused by name",
    ),
    Key("zero_force_ds_cpu_optimizer", BOOL, moot="torch's optimizers are taken; offloaded, native kernels compute"),
    Key("disable_python_gc", BOOL, as_here=(False,), remedy="gc.disable() before trainer.fit"),
    Key("graph_harvesting", BOOL, as_here=(False,), remedy="torch.compile(mode='reduce-overhead') of units"),
    Key("use_data_before_expert_parallelism", BOOL, as_here=(False,), remedy="there is no expert parallelism"),
    Key("use_data_before_expert_parallel_", BOOL, as_here=(False,), remedy="there is no expert parallelism"),
    block(
        "checkpoint",
        "tag_validation load_universal use_node_local_storage parallel_write checkpoint_serialization writer",
        switched=False,
        moot="all ranks write one file, which any number of ranks reads; strategy.checkpoint_format=sharded: a folder",
    ),
    block(
        "nebula",
        "enabled enable_nebula_load load_path nebula_load_path persistent_storage_path persistent_time_interval"
        " num_of_version_in_retention",
        remedy="strategy.async_save=true",
    ),
    Key("datastates_ckpt", ANY, remedy="strategy.async_save=true", as_here=(False,), inside=None),
    block(
        "elasticity",
        "enabled max_train_batch_size micro_batch_sizes min_gpus max_gpus num_gpus_per_node model_parallel_size"
        " min_time prefer_larger_batch prefer_large_batch ignore_non_elastic_batch_info version",
        remedy="start again with other trainer.devices: checkpoints resume with any number of ranks",
    ),
    block(
        "compile",
        "deepcompile free_activation free_activation_threshold offload_activation offload_activation_pin_memory"
        " offload_opt_states double_buffer symmetric_memory debug_log offload_parameters sync_before_reduce"
        " sync_after_reduce sync_before_allgather sync_after_allgather keep_int_input_tensors keep_all_input_tensors"
        " passes autoep_non_moe disable backend kwargs enabled",
        switched=False,
        remedy="torch.compile in configure_model: of the module at stages 0 to 2, of its blocks at stage 3",
    ),
    block(
        "hybrid_engine",
        "enabled max_out_tokens inference_tp_size release_inference_cache pin_parameters tp_gather_partition_size"
        " enable_cuda_graph",
        remedy="lightning_zero.gathered_parameters(module) around generation",
    ),
    block(
        "tensor_parallel",
        "dtype autotp_size tp_overlap_comm tensor_parallel tp injection_policy_tuple partition_config preset_model"
        " keep_module_on_host replace_with_kernel_inject kernel_inject tp_size tp_grain_size"
        " vocab_parallel_lm_head vocab_parallel_ce_backend",
        switched=False,
        remedy="there is no tensor parallelism: strategy=zero3 shards the parameters",
    ),
    block("expert_parallel", None, remedy="there is no expert parallelism: strategy=zero3 shards the experts"),
    block("pipeline", None, switched=False, remedy="there is no pipeline parallelism: strategy=zero3"),
    block("autotuning", None, remedy="lightning_zero.planning.plan says what a strategy holds and sends"),
    block(
        "sparse_attention", None, switched=False, remedy="attention is the model's: torch.nn.attention.flex_attention"
    ),
    block("curriculum_learning", None, remedy="a sampler of yours in the DataLoader"),
    block("data_efficiency", None, remedy="a sampler of yours in the DataLoader"),
    block("progressive_layer_drop", "enabled theta gamma", remedy="layer dropping is the model's"),
    block(
        "eigenvalue",
        "enabled verbose max_iter tol stability gas_boundary_resolution layer_name layer_num model_name",
        remedy="it served quantization, which is not here",
    ),
    block("compression_training", None, remedy="prune or quantize with torch.ao, before or after training"),
    block("quantize_training", None, switched=False, remedy="quantize with torch.ao, before or after training"),
    block("weight_quantization", None, switched=False, remedy="quantize with torch.ao, after training"),
)

KEYS: dict[str, Key] = (
    under("", (*_BATCH, *_COMMUNICATION, *_OBJECTS, *_REPORTS, *_OTHER))
    | under("zero_optimization", (*_ZERO, *_ZEROPP, *_DEPRECATED))
    | under("zero_optimization", (*_AT_STAGE_3, *_SHORT), stages=(3,))
    | under("zero_optimization.offload_optimizer", _OFFLOAD_OPTIMIZER)
    | under("zero_optimization.offload_param", _OFFLOAD_PARAM, stages=(3,))
    | _PRECISION
    | under("activation_checkpointing", _ACTIVATIONS)
    | _MONITORS
    | TRAINING
)
