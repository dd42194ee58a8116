"""A plan counts the arithmetic of a model: what its sizes say, for every family, length and kind of attention."""

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate, product
from typing import Any

import fuzz_models
import pytest
import torch
from hf_models import CONFIGS, transformers
from small_models import MODELS
from torch.profiler import ProfilerActivity, profile

import zfunc
import zfunc.models.hf  # pyright: ignore[reportUnusedImport]
from zfunc.core.settings import StepSettings
from zfunc.engine.trace import operation_flops, operation_kernels
from zfunc.engine.trace.cost_trace import AllocationTracker
from zfunc.optim.adamw import AdamW
from zfunc.planner.traced_costs import traced_costs
from zfunc.runtime import accelerator

ROWS, LENGTHS = 2, (8, 32)
BY_DAY = {"GPT-2", "Mistral, window", "GPT-OSS"}  # a kind of attention each, and experts
BY_HAND = {
    "Gemma 2",
    "GPT-OSS",
}  # no fused kernel bounds scores or has sinks: two products forward, four back
ALL_EXPERTS = {"Llama 4"}  # its layers multiply by every expert themselves
ANGLES_IN_PRODUCTS = " @ " in inspect.getsource(transformers.models.llama.modeling_llama.LlamaRotaryEmbedding)


def costs_of(segments: Any, batch: Any, *, on_gpu: bool = True, **more: Any) -> tuple[int, int]:
    """FLOPs of forward and of backward."""
    costs = traced_costs(segments, batch, AdamW()).traced(
        StepSettings(recompute="none"), on_gpu=on_gpu, **more
    )
    return sum(c.forward.flops for c in costs.costs), sum(c.backward.flops for c in costs.costs)


def tokens(seq: int) -> Any:
    x = torch.empty(ROWS, seq, dtype=torch.int64, device="meta")
    return x, x


def meta_model(name: str) -> Any:
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(CONFIGS[name]())


def in_products(name: str, model: Any, *, grouped: bool) -> int:
    """Weights that a token is multiplied by: all matrices but what is looked up, of experts those chosen."""
    config, looked_up = model.config, {"wte.weight", "wpe.weight", "embed_tokens.weight", "embed_in.weight"}
    total = 0
    for full, p in model.named_parameters(remove_duplicate=False):
        if ".".join(full.split(".")[-2:]) in looked_up or p.dim() < 2 or full.endswith("_bias"):
            continue
        experts = p.dim() == 3 and grouped and name not in ALL_EXPERTS
        total += p.numel() * config.num_experts_per_tok // len(p) if experts else p.numel()
    return total


def attended(name: str, model: Any, seq: int) -> Iterator[tuple[int, bool]]:
    """Products of scores of each layer, as twice the FLOPs of one, and whether a fused kernel makes them."""
    config = model.config
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    fused, window = name not in BY_HAND, getattr(config, "sliding_window", None) or seq
    for n in range(config.num_hidden_layers):
        kind = (getattr(config, "layer_types", None) or ["sliding_attention"] * (n + 1))[n]
        pairs = min(seq**2, 2 * seq * window) if kind == "sliding_attention" else seq**2
        if kind == "chunked_attention" and config.attention_chunk_size < seq:
            pairs = 3 * seq**2  # chunks count as one, and their block is attended in full
        yield ROWS * heads * size * (pairs if fused else 2 * seq**2), fused


def rotated(model: Any, seq: int, rows: int = 1) -> int:
    """FLOPs of the angles of rotary positions, which each block makes anew: a product in older transformers."""
    frequencies = next((x.numel() for name, x in model.named_buffers() if name.endswith("inv_freq")), 0)
    has_positions = getattr(model.config, "no_rope_layers", None) or [1] * model.config.num_hidden_layers
    return 2 * rows * seq * frequencies * sum(has_positions) * ANGLES_IN_PRODUCTS


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[] if x in BY_DAY else pytest.mark.slow) for x in CONFIGS]
)
def test_flops_are_those_of_the_sizes_of_a_model_at_any_length(name: str) -> None:
    """Attention is forward two products and backward two or, where scores are made again, five over two of that."""
    model = meta_model(name)
    segments = zfunc.hf.segments(model)
    with operations() as seen:
        short, long = (costs_of(segments, tokens(seq)) for seq in LENGTHS)
    assert unknown(seen) == []
    for seq, counted in zip(LENGTHS, (short, long), strict=True):
        linear = 2 * ROWS * seq * in_products(name, model, grouped=True)
        layers = [*attended(name, model, seq)]
        forward = rotated(model, seq) + sum(2 * one for one, _ in layers)
        backward = sum(5 * one if fused else 4 * one for one, fused in layers)
        assert counted == (linear + forward, 2 * linear + backward), seq
    assert 4 * short[0] < long[0], "a row of four times the length is more than four times the work"


def test_experts_are_grouped_where_the_device_has_such_kernels() -> None:
    """So workspace is that of the chosen ones, too."""
    model = meta_model("Mixtral")
    segments = zfunc.hf.segments(model)
    bare = traced_costs(segments, tokens(16), AdamW())
    grouped, every = (
        bare.traced(StepSettings(recompute="none"), on_gpu=True, grouped=x).costs for x in (True, False)
    )
    few, all_of = (sum(c.forward.flops for c in costs) for costs in (grouped, every))
    weights = [in_products("Mixtral", model, grouped=x) for x in (True, False)]
    assert all_of - few == 2 * ROWS * 16 * (weights[1] - weights[0])
    assert costs_of(segments, tokens(16), on_gpu=False)[0] == all_of
    assert max(c.backward.workspace for c in grouped) < max(c.backward.workspace for c in every)


def test_grouped_queries_and_documents_of_a_row() -> None:
    """Without a kernel of groups, keys and values are repeated: the same arithmetic, whose copies have room in the
    plan. Documents count as one, where they begin is data; beside it each block of a row is attended in full."""
    model, (x, y) = meta_model("Llama"), tokens(16)
    segments = tuple(zfunc.hf.segments(model))
    costs = traced_costs(segments, (x, y), AdamW())
    whole, without = (
        costs.traced(StepSettings(recompute="none"), on_gpu=True, grouped=grouped).costs
        for grouped in (True, False)
    )
    assert whole[1].forward.flops == without[1].forward.flops
    assert whole[1].residual_bytes < without[1].residual_bytes
    packed = costs_of(segments, ({"input_ids": x, "position_ids": x}, y))
    one = next(attended("Llama", model, 16))[0]
    of_each_row = rotated(model, 16, ROWS) - rotated(model, 16)
    assert packed[0] - sum(c.forward.flops for c in whole) == 3 * 4 * one + of_each_row
    assert packed[1] - sum(c.backward.flops for c in whole) == 3 * 10 * one


# ---- no operation is forgotten -----------------------------------------------------------------------

# Beside those that torch tags as element-wise, and views.
WITHOUT_PRODUCTS = """
_fft_c2c _fft_c2r _fft_r2c _log_softmax _log_softmax_backward_data _safe_softmax _softmax
_softmax_backward_data _to_copy addcmul all amax amin any arange bernoulli bernoulli_ cat clone constant_pad_nd
copy_ cummax cumsum detach embedding embedding_dense_backward fill fill_ flip floor_divide full full_like gather glu
glu_backward histc index index_add index_add_ index_put index_put_ index_select linalg_vector_norm
lift_fresh_copy log_sigmoid_backward log_sigmoid_forward logsumexp masked_fill_ max mean mse_loss mse_loss_backward
native_batch_norm native_batch_norm_backward native_dropout_backward native_layer_norm
native_layer_norm_backward new_full new_ones new_zeros nll_loss2d_backward nll_loss2d_forward nll_loss_backward
nll_loss_forward normal_ ones ones_like polar rand rand_like randn repeat rrelu_with_noise rrelu_with_noise_backward
scalar_tensor scatter scatter_ scatter_add scatter_add_ searchsorted select_backward slice_backward sort stack
sum topk transpose_ tril uniform uniform_ unsafe_split var_mean zero_ zeros zeros_like
"""


@contextmanager
def operations() -> Iterator[set[Any]]:
    seen, formula = set[Any](), operation_flops.formula

    def spy(packet: Any) -> Any:
        seen.add(packet)
        return formula(packet)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(operation_flops, "formula", spy)
        yield seen


def unknown(packets: set[Any]) -> list[str]:
    """Names of operations that have no formula and are not known to multiply no matrices."""

    def known(packet: Any) -> bool:
        functions = [getattr(packet, x) for x in packet.overloads()]
        return (
            operation_flops.formula(packet) is not None
            or not any(operation_kernels.is_launched(f) for f in functions)
            or any(torch.Tag.pointwise in f.tags for f in functions)
            or packet.__name__ in WITHOUT_PRODUCTS.split()
        )

    return sorted(str(x) for x in packets if not known(x))


@pytest.mark.parametrize("small", [(), pytest.param((*MODELS,), marks=pytest.mark.slow)], ids=len)
def test_no_operation_of_any_piece_of_a_model_is_forgotten(small: tuple[str, ...]) -> None:
    """One that is not known to multiply nothing needs a formula, or its FLOPs would be 0. Nor of `small` models."""
    pieces = tuple(fuzz_models.KEEPING), tuple(fuzz_models.CHANGING)
    models = [fuzz_models.Model((("linear",),), ("tensor",), loss) for loss in fuzz_models.LOSSES]
    models.append(fuzz_models.Model(pieces, ("tensor", "tensor"), "sum"))
    with operations() as seen:
        for model in models:
            costs_of(model.built()[0], model.batch(0))
        for name in small:
            segments, batch = MODELS[name]()
            costs_of(segments, batch(0))
    assert len(seen) > 60
    assert unknown(seen) == []
    assert unknown({torch.ops.aten._int_mm}) == ["aten._int_mm"]


@pytest.mark.parametrize(("kind", "fused"), [("rnn", False), ("gru", False), ("lstm", False), ("lstm", True)])
def test_a_recurrent_layer_multiplies_each_row_by_its_weights(
    kind: str, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fused kernel, which torch has for some CPUs, makes the gradients of its input and first state, too."""
    model = fuzz_models.Model(((kind,),), ("tensor",), "sum")
    segments = model.built()[0]
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", fused)
    forward, backward = costs_of(segments, model.batch(0))
    rows = 2 * fuzz_models.BATCH * fuzz_models.ROWS
    matrices = sum(math.prod(p.shape) for p in segments[0].parameters if len(p.shape) == 2)
    out = 2 * fuzz_models.BATCH * fuzz_models.WIDTH
    first = (
        rows * matrices // 2 * (fuzz_models.ROWS + 1) // fuzz_models.ROWS
    )  # nothing below, no state before
    assert forward == rows * matrices + out
    assert backward in ((2 * forward, 2 * forward - first) if fused else (2 * forward - first,))


def test_an_operation_with_a_kernel_of_its_own_is_one_launch() -> None:
    """Though torch could also make it of others."""
    x = torch.ones(1024)
    with AllocationTracker(of_accelerator=True) as seen:
        torch.ops.aten.silu_backward(x, x)
    assert seen.launches == 1


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("heads", "size", "tokens"), [((4, 4), 64, 256), ((32, 8), 128, 384), ((4, 2), 72, 200)]
)
@pytest.mark.parametrize("ranges", [None, 5])
def test_backward_of_attention_counts_what_its_kernel_on_cuda_allocates(
    heads: tuple[int, int], size: int, tokens: int, ranges: int | None, deterministic: bool
) -> None:
    """The tensors of `mha_bwd` and `mha_varlen_bwd`, in the words of flash_api.cpp."""
    round_multiple = lambda x, m: (x + m - 1) // m * m  # noqa: E731
    num_heads, num_heads_k = heads
    head_size_rounded = round_multiple(size, 32 if size <= 128 else 64)
    room = (2, round_multiple(tokens, 128)) if ranges is None else (tokens + 128 * ranges,)
    nsplits = -(-160 // ((ranges or 2) * num_heads)) if deterministic else 1
    shape = (2, tokens) if ranges is None else (tokens,)
    with torch.device("meta"):
        softmax_d = torch.empty(*room, num_heads)
        dq_accum = torch.empty(nsplits, *room, num_heads, head_size_rounded)
        expanded = torch.empty(
            2, *shape, num_heads if num_heads_k < num_heads else 0, size, dtype=torch.bfloat16
        )
        q, k, out = (torch.empty(*shape, n, size, dtype=torch.bfloat16) for n in (*heads, num_heads))
        scattered = torch.empty(*shape, size, num_heads, dtype=torch.bfloat16).mT
        sums = torch.empty(2, num_heads, tokens)
    given = scattered, q, k, k, out
    if ranges is None:
        run, given = (
            torch.ops.aten._scaled_dot_product_flash_attention_backward,
            [x.transpose(1, 2) for x in given],
        )
    else:
        run = torch.ops.aten._flash_attention_backward
    at = None if ranges is None else torch.empty(ranges + 1, dtype=torch.int32)
    with accelerator.deterministic_kernels(deterministic):
        counted = operation_kernels.cuda_kernel_bytes(run.default, (*given, sums, at, at))
    assert counted == sum(x.nbytes for x in (softmax_d, dq_accum, expanded, scattered))


@pytest.mark.parametrize(
    ("tokens", "vocabulary", "scaled"),
    [(3072, 50, False), (3072, 50, True), (5000, 700, False), (5000, 9000, True)],
)
def test_backward_of_an_embedding_counts_what_its_kernel_on_cuda_allocates(
    tokens: int, vocabulary: int, scaled: bool
) -> None:
    """The tensors of `embedding_backward_cuda_kernel` that are alive with the sums, in its words; and copies of a
    gradient and of indices that are not contiguous."""
    max_segments = min(tokens, vocabulary)
    max_partial_segment = tokens // 10 + max_segments
    with torch.device("meta"):
        grad_weight_per_segment = torch.empty(max_partial_segment, 48)
        sorted_indices, orig_indices, segment_offsets, count = torch.empty(4, tokens, dtype=torch.int64)
        partials_per_segment, partials_per_segment_offset = torch.empty(2, max_segments, dtype=torch.int64)
        partial_segment_offset = torch.empty(max_partial_segment, dtype=torch.int64)
        given = torch.empty(1, tokens, 48, dtype=torch.bfloat16)
        indices = torch.empty(1, tokens, dtype=torch.int64)
    allocated = [grad_weight_per_segment, sorted_indices, orig_indices, segment_offsets, partials_per_segment]
    allocated += [partials_per_segment_offset, partial_segment_offset, *([count] if scaled else [])]
    needed = sum(x.nbytes for x in allocated) if tokens > 3072 or scaled else 0
    run = torch.ops.aten.embedding_dense_backward.default
    every_second = torch.empty(1, 2 * tokens, dtype=torch.int64, device="meta")[:, ::2]
    ways = (given, indices, 0), (given[:, :1].expand_as(given), indices, given.nbytes)
    for grad, at, copied in (*ways, (given, every_second, indices.nbytes)):
        assert operation_kernels.cuda_kernel_bytes(run, (grad, at, vocabulary, -1, scaled)) == needed + copied


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scaled", [False, True])
def test_backward_of_an_embedding_counts_what_its_kernel_on_the_cpu_allocates(
    dtype: torch.dtype, scaled: bool
) -> None:
    """By the allocator's own record: the most that is alive beside the result, which is there from the start."""
    run = torch.ops.aten.embedding_dense_backward.default
    grad, indices = torch.ones(6, 5, 7, dtype=dtype), torch.arange(30).reshape(6, 5)
    grads = grad, grad[:, :1].expand(6, 5, 7), grad.permute(1, 0, 2).contiguous().permute(1, 0, 2)
    for given, at in product(grads, (indices, indices.mT.contiguous().mT)):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
            out = run(given, at, 40, -1, scaled)
        events = [x for x in seen.profiler.kineto_results.events() if x.name() == "[memory]"]  # pyright: ignore
        alive = accumulate(x.nbytes() for x in sorted(events, key=lambda x: x.start_ns()))
        counted = operation_kernels.cpu_kernel_bytes(run, (given, at, 40, -1, scaled), out)
        assert counted == max(alive) - out.nbytes


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("size", "width", "dtype", "tile", "parts"),
    [
        (32, 32, torch.float32, (64, 64), 0),
        (64, 64, torch.bfloat16, (64, 64), 0),
        (80, 80, torch.bfloat16, (128, 128), 0),
        (32, 128, torch.float32, (128, 64), 0),
        (256, 256, torch.bfloat16, (128, 64), 5),
        (192, 128, torch.float16, (128, 64), 5),
    ],
)
def test_backward_of_memory_efficient_attention_counts_what_its_kernel_on_cuda_allocates(
    size: int, width: int, dtype: torch.dtype, tile: tuple[int, int], parts: int, deterministic: bool
) -> None:
    """`workspace_elements_gq` of the kernels of cutlassB.h, each with a lock, a counter and a pad; those of gk and
    gv for each split of the keys, and `delta`; in fp32 the product that `delta` sums may be more."""
    q, k = (torch.empty(2, 3, x, size, dtype=dtype, device="meta") for x in (200, 300))
    v, out = (torch.empty(2, 3, x, width, dtype=dtype, device="meta") for x in (300, 200))
    num_blocks, num_cols = -(-200 // tile[0]), -(-size // tile[1])
    elements = num_blocks * num_cols * (tile[0] * tile[1] + 4)
    elements += (
        (1 if deterministic and parts else parts) * 64 * sum(-(-x // 128) * 128 for x in (size, width))
    )
    run = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
    product = out.numel() + 2 * 2 * 3 * 200 if dtype == torch.float32 else 0
    with accelerator.deterministic_kernels(deterministic):
        counted = operation_kernels.cuda_kernel_bytes(run, (out, q, k, v, None, out))
    assert counted == 4 * max(2 * 3 * (elements + 200), product)


def test_of_many_heads_memory_efficient_attention_sums_dk_and_dv_once() -> None:
    """200 // heads splits, or one; by the same law as above."""
    counted = []
    for heads in (100, 101, 300):
        q = torch.empty(1, heads, 1024, 256, dtype=torch.bfloat16, device="meta")
        run = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
        sums = heads * (8 * 4 * (128 * 64 + 4) + 1024)
        counted.append((operation_kernels.cuda_kernel_bytes(run, (q, q, q, q, None, q)) // 4 - sums) / heads)
    assert counted == [2 * 64 * 512, 64 * 512, 64 * 512]
