"""The rows for everything beside the training itself: logs, profiles, checkpoints, other kinds of parallelism.

The invariant: every default is the one there, also where zfunc's own differs.
"""

from zfunc.train.deepspeed.key import Key, each_ignored, ignored, supported, unsupported
from zfunc.train.deepspeed.takes import (
    ANYTHING,
    BLOCK,
    COUNT,
    FLAG,
    LIST,
    NUMBER,
    SIZE,
    TEXT,
    choice_of,
    whole_number,
)

_METRICS = "metrics.jsonl in the run folder has every step"
_FLOPS = "`zfunc plan` and `zfunc draw` count FLOPs and say what bounds a step"
_COMPILE = "`compile_segments` is what puts segments through torch.compile"
_TP = "one process has the whole model here"
_LAYERS = "`recompute` decides, for every segment, what is computed again and what is kept"
_SEARCH = "`zfunc plan` says what fits and what would help, before anything runs"
_SCALARS = (
    "`zfunc train` writes `Train/Samples/train_loss`, `Train/Samples/lr`, in fp16 `Train/Samples/loss_scale`, and "
    "beside them, by names of its own, what else metrics.jsonl has, all against samples"
)
_REMOVED = "it was removed there too: delete it"

_PLACES = {
    block: (
        supported(
            f"{block}.output_path", TEXT, "", "the folder that `job_name` is in; without it, where one is"
        ),
        supported(f"{block}.job_name", TEXT, "DeepSpeedJobName", "the folder that is written to"),
    )
    for block in ("tensorboard", "csv_monitor")
}

LOGS: tuple[Key, ...] = (
    supported(
        "wall_clock_breakdown",
        FLAG,
        False,
        "`zfunc train` measures one step in any case, operation by operation, and draws it; every row of "
        "metrics.jsonl has the seconds of the step, and those of the host; `--log-style deepspeed` prints times",
    ),
    ignored(
        "memory_breakdown", FLAG, False, "memory is planned before it is taken, and measured at every step"
    ),
    ignored("dump_state", FLAG, False, "the run folder's config.json has all settings"),
    ignored("log_level", TEXT, None, "the logger is `zfunc`, as a Python program sets it"),
    ignored("disable_python_gc", FLAG, False, "a step makes too few objects to matter"),
    ignored("vocabulary_size", SIZE, None, "the model says its own"),
    *each_ignored("timers.throughput", _METRICS, enabled=(FLAG, True), synchronized=(FLAG, True)),
    supported("tensorboard.enabled", FLAG, False, f"{_SCALARS}; needs `zfunc[tensorboard]`"),
    *_PLACES["tensorboard"],
    supported(
        "wandb.enabled",
        FLAG,
        False,
        f"{_SCALARS}; to `wandb` in the run folder, offline unless `WANDB_MODE` says otherwise; needs "
        "`zfunc[wandb]`",
    ),
    supported("wandb.group", TEXT, None, "as there"),
    supported("wandb.team", TEXT, None, "as there"),
    supported("wandb.project", TEXT, "deepspeed", "as there"),
    supported("csv_monitor.enabled", FLAG, False, f"{_SCALARS}; a file for each"),
    *_PLACES["csv_monitor"],
    *each_ignored(
        "comet",
        _METRICS,
        enabled=(FLAG, False),
        samples_log_interval=(COUNT, 100),
        project=(TEXT, None),
        workspace=(TEXT, None),
        api_key=(TEXT, None),
        experiment_name=(TEXT, None),
        experiment_key=(TEXT, None),
        online=(FLAG, None),
        mode=(TEXT, None),
    ),
    *each_ignored(
        "comms_logger",
        "`Metrics.sent_bytes` counts what a step sends",
        enabled=(FLAG, False),
        prof_all=(FLAG, True),
        prof_ops=(LIST, []),
        verbose=(FLAG, False),
        debug=(FLAG, False),
    ),
    *each_ignored(
        "flops_profiler",
        _FLOPS,
        enabled=(FLAG, False),
        recompute_fwd_factor=(NUMBER, 0.0),
        profile_step=(SIZE, 1),
        module_depth=(whole_number(-1), -1),
        top_modules=(SIZE, 1),
        detailed=(FLAG, True),
        output_file=(TEXT, None),
    ),
    *each_ignored(
        "autotuning",
        _SEARCH,
        enabled=(FLAG, False),
        fast=(FLAG, True),
        results_dir=(TEXT, "autotuning_results"),
        exps_dir=(TEXT, "autotuning_exps"),
        overwrite=(FLAG, True),
        start_profile_step=(SIZE, 3),
        end_profile_step=(SIZE, 5),
        metric=(TEXT, "throughput"),
        metric_path=(TEXT, None),
        tuner_type=(TEXT, "gridsearch"),
        tuner_early_stopping=(SIZE, 5),
        tuner_num_trials=(SIZE, 50),
        arg_mappings=(BLOCK, None),
        model_info_path=(TEXT, None),
        model_info=(BLOCK, None),
        mp_size=(COUNT, 1),
        max_train_batch_size=(COUNT, None),
        min_train_batch_size=(COUNT, 1),
        max_train_micro_batch_size_per_gpu=(COUNT, 1024),
        min_train_micro_batch_size_per_gpu=(COUNT, 1),
        num_tuning_micro_batch_sizes=(COUNT, 3),
    ),
)

MEMORY: tuple[Key, ...] = (
    *each_ignored(
        "activation_checkpointing",
        _LAYERS,
        partition_activations=(FLAG, False),
        number_checkpoints=(SIZE, None),
        contiguous_memory_optimization=(FLAG, False),
        synchronize_checkpoint_boundary=(FLAG, False),
        profile=(FLAG, False),
    ),
    ignored(
        "activation_checkpointing.cpu_checkpointing",
        FLAG,
        False,
        "activations stay on the device; with `recompute` all, a segment keeps its input alone",
    ),
    ignored(
        "data_types.grad_accum_dtype",
        choice_of("fp32", "fp16", "bf16"),
        None,
        "gradients of micro-batches are always added up in fp32",
    ),
    ignored("data_types.param_dtype", TEXT, None, "`precision` is that of all parameters on the device"),
    ignored("data_types.buffer_dtype", TEXT, None, "a module's buffers keep the type they have"),
    ignored(
        "data_types.keep_in_fp32_modules", ANYTHING, "auto", "a module's buffers keep the type they have"
    ),
)

CHECKPOINTS: tuple[Key, ...] = (
    *each_ignored(
        "checkpoint",
        "checkpoints are one format: whole or not there, with a checksum, for any number of ranks",
        tag_validation=(choice_of("Ignore", "Warn", "Fail"), "Warn"),
        load_universal=(FLAG, False),
        use_node_local_storage=(FLAG, False),
        checkpoint_serialization=(FLAG, True),
        parallel_write=(BLOCK, None),
        writer=(BLOCK, None),
    ),
    ignored("datastates_ckpt", BLOCK, None, "`train_step(save=)` writes while the step goes on"),
)

PARALLEL: tuple[Key, ...] = (
    unsupported("tensor_parallel.autotp_size", f"{_TP}: leave it out", SIZE, 0),
    *each_ignored(
        "tensor_parallel",
        _TP,
        dtype=(TEXT, None),
        tp_overlap_comm=(FLAG, False),
        vocab_parallel_lm_head=(FLAG, None),
        vocab_parallel_ce_backend=(TEXT, "torch"),
        tensor_parallel=(BLOCK, None),
        tp=(BLOCK, None),
        partition_config=(BLOCK, None),
        preset_model=(TEXT, None),
        injection_policy_tuple=(LIST, None),
        keep_module_on_host=(FLAG, False),
        replace_with_kernel_inject=(FLAG, False),
    ),
    *each_ignored(
        "pipeline",
        _TP,
        stages=(ANYTHING, "auto"),
        partition=(TEXT, "best"),
        seed_layers=(FLAG, False),
        activation_checkpoint_interval=(SIZE, 0),
        pipe_partitioned=(FLAG, True),
        grad_partitioned=(FLAG, True),
    ),
    unsupported("sequence_parallel_size", f"{_TP}: leave it out", COUNT, 1),
    ignored(
        "seq_parallel_communication_data_type",
        choice_of("fp32", "fp16", "bf16"),
        "fp32",
        "sequences are never split",
    ),
    unsupported("expert_parallel", f"{_TP}: leave it out", BLOCK, None),
    ignored("use_data_before_expert_parallelism", FLAG, False, _TP),
    unsupported(
        "hybrid_engine", "it is for generating while training, which is not there: leave it out", BLOCK, None
    ),
    unsupported("compile.deepcompile", f"{_COMPILE}: leave it out"),
    *each_ignored(
        "compile",
        _COMPILE,
        autoep_non_moe=(FLAG, False),
        free_activation=(FLAG, False),
        free_activation_threshold=(SIZE, 10 * 1024 * 1024),
        offload_activation=(FLAG, False),
        offload_activation_pin_memory=(FLAG, True),
        offload_opt_states=(FLAG, False),
        double_buffer=(FLAG, True),
        symmetric_memory=(FLAG, False),
        debug_log=(FLAG, False),
        offload_parameters=(FLAG, False),
        sync_before_reduce=(FLAG, False),
        sync_after_reduce=(FLAG, False),
        sync_before_allgather=(FLAG, False),
        sync_after_allgather=(FLAG, False),
        keep_int_input_tensors=(FLAG, True),
        keep_all_input_tensors=(FLAG, False),
        passes=(LIST, None),
    ),
    unsupported("data_efficiency", "data is read in an order that the seed gives: leave it out", BLOCK, None),
    unsupported("weight_quantization", "weights are trained in `precision`: leave it out", BLOCK, None),
    ignored("disable_allgather", FLAG, False, "new parameters are always gathered"),
)

REMOVED: tuple[Key, ...] = (
    unsupported(
        "sparse_gradients", "gradients of embeddings are dense here, and it was removed there too: delete it"
    ),
    unsupported("amp", 'use "bf16" or "fp16"; it was removed there too', BLOCK, None),
    *(
        unsupported(name, _REMOVED, BLOCK, None)
        for name in (
            *("elasticity", "nebula", "compression_training", "quantize_training", "eigenvalue"),
            *("sparse_attention", "curriculum_learning", "progressive_layer_drop"),
        )
    ),
    unsupported("graph_harvesting", _REMOVED),
)

OTHER_KEYS: tuple[Key, ...] = (*LOGS, *MEMORY, *CHECKPOINTS, *PARALLEL, *REMOVED)
