"""The rows of `zero_optimization` and of what its offloading reads: where state and parameters are, and what moves.

The invariant: every default is the one there, also where zfunc's own differs.
"""

import sys

from zfunc.train.deepspeed.key import Key, each_ignored, ignored, supported, unsupported
from zfunc.train.deepspeed.takes import BLOCK, COUNT, FLAG, LIST, SHARE, SIZE, TEXT, choice_of, whole_number

DEVICES = ("none", "cpu", "nvme")
_Z = "zero_optimization."
_O = _Z + "offload_optimizer."
_P = _Z + "offload_param."
_STAGE3 = "it is of stage 3, and parameters stay on the device here"
_PLAN = "what is copied, sent and computed at once is the schedule's choice, and derived from what operations touch"
_ONE_WAY = "there is one way here: buckets are reduced and scattered, and gathered, as they become ready"
_NVME = "nothing is kept on NVMe here"
_CHECKPOINT = "checkpoints have the exact fp32 weights, by name, and any number of ranks loads them"

ZERO_KEYS: tuple[Key, ...] = (
    supported(
        _Z + "stage",
        choice_of(0, 1, 2, 3),
        0,
        "`stage`; 0 trains as 1: each rank keeps a slice of the optimizer's state anyway, with the same result",
        3,
        instead="parameters have to fit on the device in 16 bits here: use stage 2; `zfunc plan` says what fits",
    ),
    supported(
        _Z + "reduce_bucket_size",
        COUNT,
        500_000_000,
        "`bucket_size`, elements that are reduced, moved and updated as a unit; without the key 50,000,000, or "
        "262,144 in `zfunc train` on a CPU",
    ),
    supported(
        _O + "device",
        choice_of(*DEVICES),
        "none",
        "`offload_ratio`: cpu is `ratio`, none is 0. Without `offload_optimizer` it is 1, because that is what "
        "zfunc is for",
        "nvme",
        instead='the optimizer\'s state is on the host or on the device here: use "cpu"',
    ),
    supported(_O + "ratio", SHARE, 1.0, "`offload_ratio`; with any stage"),
    ignored(
        _O + "pin_memory",
        FLAG,
        True,
        "what is copied is in pinned memory of exactly its size, the rest is not",
    ),
    ignored(
        _O + "cpuadam_cores_perc",
        SHARE,
        0.8,
        "threads are the physical cores this process may use, over its ranks",
    ),
    ignored(
        _O + "super_offload",
        FLAG,
        False,
        "`speculate` updates before the norm is known, and with the same bits",
    ),
    *each_ignored(
        _O[:-1],
        _NVME,
        nvme_path=(TEXT, None),
        buffer_count=(SIZE, 4),
        pipeline_read=(FLAG, False),
        pipeline_write=(FLAG, False),
        fast_init=(FLAG, False),
    ),
    unsupported(
        _P + "device",
        "parameters stay on the device in 16 bits here: leave offload_param out",
        choice_of(*DEVICES),
        "none",
    ),
    *each_ignored(
        _P[:-1],
        _STAGE3,
        nvme_path=(TEXT, None),
        buffer_count=(SIZE, 5),
        buffer_size=(SIZE, 100_000_000),
        max_in_cpu=(SIZE, 1_000_000_000),
        pin_memory=(FLAG, True),
    ),
    *each_ignored(_Z[:-1], _PLAN, overlap_comm=(FLAG, None), contiguous_gradients=(FLAG, True)),
    *each_ignored(
        _Z[:-1],
        _ONE_WAY,
        reduce_scatter=(FLAG, True),
        use_multi_rank_bucket_allreduce=(FLAG, True),
        allgather_partitions=(FLAG, True),
        allgather_bucket_size=(SIZE, 500_000_000),
        round_robin_gradients=(FLAG, False),
        parameter_alignment=(FLAG, False),
        legacy_stage1=(FLAG, False),
    ),
    ignored(_Z + "compute_grad_norm", FLAG, True, "the norm is always computed, on the way"),
    *each_ignored(
        _Z[:-1], _CHECKPOINT, load_from_fp32_weights=(FLAG, True), elastic_checkpoint=(FLAG, False)
    ),
    ignored(_Z + "ignore_unused_parameters", FLAG, True, "a parameter that is not used has a gradient of 0"),
    ignored(
        _Z + "enable_sanity_checks",
        FLAG,
        False,
        "plans are always verified; `train_step(debug=True)` checks more",
    ),
    unsupported(
        _Z + "zenflow",
        "updates that wait for some gradients and not for others are not there; `delay_from` is the nearest",
        BLOCK,
        None,
    ),
    *each_ignored(
        _Z[:-1],
        _STAGE3,
        sub_group_size=(SIZE, 1_000_000_000),
        stage3_prefetch_bucket_size=(SIZE, 50_000_000),
        stage3_param_persistence_threshold=(SIZE, 100_000),
        stage3_model_persistence_threshold=(SIZE, sys.maxsize),
        stage3_max_live_parameters=(SIZE, 1_000_000_000),
        stage3_max_reuse_distance=(SIZE, 1_000_000_000),
        stage3_gather_16bit_weights_on_model_save=(FLAG, False),
        stage3_module_granularity_threshold=(whole_number(), 0),
        stage3_use_all_reduce_for_fetch_params=(FLAG, False),
        stage3_allgather_sequential=(FLAG, False),
        zero_hpz_partition_size=(SIZE, 1),
        zero_quantized_weights=(FLAG, False),
        zero_quantized_nontrainable_weights=(FLAG, False),
        zero_quantized_gradients=(FLAG, False),
        memory_efficient_linear=(FLAG, True),
        pipeline_loading_checkpoint=(FLAG, False),
        override_module_apply=(FLAG, True),
        log_trace_cache_warnings=(FLAG, False),
        save_muon_momentum_buffer_in_memory=(FLAG, False),
    ),
    *each_ignored(
        _Z + "leaf_module", _STAGE3, classes=(LIST, None), names=(LIST, None), name_suffixes=(LIST, None)
    ),
    unsupported(_Z + "mics_shard_size", "it was removed there too: delete it", whole_number(-1), -1),
    unsupported(_Z + "mics_hierarchical_params_gather", "it was removed there too: delete it"),
    unsupported(_Z + "zeropp_loco_param", "it was removed there too: delete it", BLOCK, None),
    *each_ignored(
        "aio",
        _NVME,
        block_size=(COUNT, 1_048_576),
        queue_depth=(COUNT, 8),
        intra_op_parallelism=(COUNT, 1),
        single_submit=(FLAG, False),
        overlap_events=(FLAG, True),
        use_gds=(FLAG, False),
    ),
)
