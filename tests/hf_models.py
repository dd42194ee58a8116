"""Random models of transformers, small ones of every family that zfunc.hf knows, and batches for them."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc
import zfunc.models.hf  # pyright: ignore[reportUnusedImport]
from zfunc.engine.program.program import Program

transformers = pytest.importorskip("transformers")

IGNORED, VOCAB = -100, 61
SIZE: dict[str, Any] = {
    **{"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32}
GPT2 |= {"bos_token_id": 1, "eos_token_id": 2}
DRY = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 8}
LONG |= {"factor": 4.0, "short_factor": [1.0, 1.5, 2.0, 4.0], "long_factor": [2.0, 3.0, 5.0, 9.0]}
T5 = {"vocab_size": 8, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
DEEPSEEK_SIZE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
DEEPSEEK_SIZE |= {"moe_intermediate_size": 8, "first_k_dense_replace": 0, "q_lora_rank": 8, "kv_lora_rank": 8}
DEEPSEEK_SIZE |= {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
ROUTED = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.5}
TYPES = ["sliding_attention", "full_attention", "sliding_attention"]


def config(kind: str, **given: Any) -> Callable[..., Any]:
    return lambda **more: getattr(transformers, f"{kind}Config")(**given | more)


CONFIGS: dict[str, Callable[..., Any]] = {
    "GPT-2": config("GPT2", **GPT2, **DRY),
    "GPT-2 scaled by layer": config("GPT2", **GPT2, **DRY, scale_attn_by_inverse_layer_idx=True),
    "GPT-2 untied": config("GPT2", **GPT2, **DRY, tie_word_embeddings=False),
    "Llama": config("Llama", **SIZE),
    "Llama tied": config("Llama", **SIZE, tie_word_embeddings=True, attention_bias=True),
    "Llama, linear positions": config(
        "Llama", **SIZE, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    ),
    "Llama 3 positions": config("Llama", **SIZE, rope_parameters=LLAMA3),
    "Llama, YaRN": config("Llama", **SIZE, rope_parameters=YARN),
    "Llama, dynamic positions": config(
        "Llama", **SIZE | {"max_position_embeddings": 8}, rope_parameters=DYNAMIC
    ),
    "Mistral, window": config("Mistral", **SIZE, sliding_window=5),
    "Mistral, long window": config("Mistral", **SIZE, sliding_window=500),
    "Qwen2": config("Qwen2", **SIZE, use_sliding_window=True, sliding_window=4, max_window_layers=1),
    "Qwen3": config("Qwen3", **SIZE, head_dim=12),
    "Gemma": config("Gemma", **SIZE | {"num_key_value_heads": 1}, head_dim=16),
    "Gemma 2": config("Gemma2", **SIZE, head_dim=16, sliding_window=4),
    "Gemma 3": config("Gemma3Text", **SIZE, head_dim=16, sliding_window=4, layer_types=TYPES),
    "Gemma 3, dynamic positions": config(
        "Gemma3Text",
        **SIZE | {"max_position_embeddings": 8},
        head_dim=16,
        sliding_window=4,
        layer_types=TYPES,
        rope_parameters={
            "full_attention": DYNAMIC,
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "GPT-NeoX": config("GPTNeoX", **SIZE, hidden_dropout=0.0),
    "Phi-3": config("Phi3", **SIZE, sliding_window=5),
    "Phi-3, long positions": config("Phi3", **SIZE, rope_parameters=LONG, original_max_position_embeddings=8),
    "OLMo 2": config("Olmo2", **SIZE),
    "Mixtral": config("Mixtral", **SIZE, **ROUTED, num_local_experts=4),
    "Qwen3 MoE": config(
        "Qwen3Moe",
        **SIZE,
        **ROUTED,
        head_dim=12,
        num_experts=4,
        moe_intermediate_size=16,
        mlp_only_layers=[1],
    ),
    "GPT-OSS": config(
        "GptOss", **SIZE, **ROUTED, head_dim=16, num_local_experts=4, sliding_window=4, layer_types=TYPES
    ),
    "Llama 4": config(
        "Llama4Text",
        **SIZE,
        head_dim=16,
        intermediate_size_mlp=40,
        num_local_experts=4,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
        attention_chunk_size=4,
        no_rope_layers=[1, 1, 0],
    ),
}
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
LINEAR |= {"linear_value_head_dim": 8, "linear_conv_kernel_dim": 3}
LINEAR |= {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
MAMBA |= {"mamba_chunk_size": 8, "mamba_expand": 2}
NEMOTRON = {"layers_block_type": ["mamba", "attention", "moe", "mlp"], "head_dim": 8, "mamba_num_heads": 4}
NEMOTRON |= {"mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 8, "n_routed_experts": 4}
NEMOTRON |= {"moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16, "num_experts_per_tok": 2}
HYBRIDS: dict[str, Callable[[], Any]] = {  # with states of convolutions or linear attention
    "LFM2": config("Lfm2", **SIZE, layer_types=["conv", "full_attention", "conv"], block_multiple_of=8),
    "Qwen3.5": config("Qwen3_5Text", **SIZE, **LINEAR, head_dim=16),
    "Qwen3.5 MoE": config("Qwen3_5MoeText", **SIZE, **LINEAR, **EXPERTS, head_dim=16),
    "Qwen3-Next": config("Qwen3Next", **SIZE, **LINEAR, **EXPERTS, head_dim=16),
    "OLMo hybrid": config("OlmoHybrid", **SIZE, **LINEAR),
    "Falcon-H1": config("FalconH1", **SIZE, **MAMBA, mamba_d_ssm=64),
    "Bamba": config("Bamba", **SIZE, **MAMBA, attn_layer_indices=[1]),
    "Nemotron-H": config("NemotronH", **SIZE, **NEMOTRON),
    "Granite 4": config(
        "GraniteMoeHybrid",
        **SIZE,
        **MAMBA,
        layer_types=["mamba", "attention", "mamba"],
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=16,
    ),
}
WINDOWED = SIZE | {"layer_types": TYPES, "max_position_embeddings": 64}
LATER = SIZE | {"use_sliding_window": True, "max_window_layers": 1}
SHARED = EXPERTS | {"shared_expert_intermediate_size": 16}
MIXED: dict[str, Callable[[int], Any]] = {
    "Qwen2": lambda n: CONFIGS["Qwen2"](sliding_window=n),
    "Qwen3": lambda n: config("Qwen3", **LATER, head_dim=12)(sliding_window=n),
    "Qwen2 MoE": lambda n: config("Qwen2Moe", **LATER, **SHARED)(sliding_window=n),
    "Llama 4": lambda n: CONFIGS["Llama 4"](attention_chunk_size=n),
    **{x: lambda n, x=x: CONFIGS[x](sliding_window=n) for x in ("Gemma 2", "Gemma 3", "GPT-OSS")},
    **{
        x: lambda n, x=x: config(x, **WINDOWED)(sliding_window=n)
        for x in ("Cohere2", "Exaone4", "Olmo3", "SmolLM3", "VaultGemma")
    },
}
"""Models some of whose layers see so many tokens, in a window or a chunk, and others all before."""
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 8, "patch_size": 4}
TEXT = SIZE | {"head_dim": 16, "sliding_window": 4, "layer_types": TYPES}
GEMMA_IMAGES = config("Gemma3", text_config=TEXT, vision_config=VISION, mm_tokens_per_image=4)
GEMMA_4 = config(
    "Gemma4Text",
    **TEXT,
    global_head_dim=16,
    vocab_size_per_layer_input=VOCAB,
    hidden_size_per_layer_input=0,
    num_kv_shared_layers=0,
)
ERNIE = config(
    "Ernie4_5_Moe", **SIZE, moe_num_experts=4, moe_k=2, moe_intermediate_size=16, moe_layer_start_index=0
)
DEEPSEEK = config("DeepseekV3", **SIZE | DEEPSEEK_SIZE | {"num_hidden_layers": 1, "num_key_value_heads": 4})


def random_model(name: str, **given: Any) -> Any:
    """A model of random weights, norms and biases too."""
    return model_of({**CONFIGS, **HYBRIDS}[name](**given))


@cache
def cut(name: str) -> Sequence[zfunc.Segment]:
    """Segments of a random model, cut once: no test changes its weights."""
    return zfunc.hf.segments(random_model(name))


def model_of(made: Any) -> Any:
    """A model of random weights of a config."""
    torch.manual_seed(0)
    if getattr(made, "attn_logit_softcapping", None) is not None:
        made._attn_implementation = "eager"  # sdpa of transformers 5.17 leaves the cap out
    return perturbed(transformers.AutoModelForCausalLM.from_config(made))


def perturbed(model: Any) -> Any:
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model


def assert_plain(segments: Any, model: Any, inputs: Any, targets: Any, expected: Tensor) -> None:
    """The loss and every gradient of segments, by plain autograd, are those of a model with this loss."""
    named = dict(model.named_parameters())
    own = torch.autograd.grad(expected, list(named.values()), allow_unused=True, materialize_grads=True)
    values = {full: p.detach().clone().requires_grad_() for full, p in named.items()}
    x = inputs
    for s in segments:
        params = {short: values[full] for short, full in s.by_short.items()}
        x = s.evaluation({**params, **s.constants}, x, *([targets] if s is segments[-1] else []))
    torch.testing.assert_close(x, expected, rtol=1e-6, atol=0)
    grads = torch.autograd.grad(x, list(values.values()), allow_unused=True, materialize_grads=True)
    largest = max(float(g.abs().max()) for g in own)
    for full, g, expected_grad in zip(named, grads, own, strict=True):
        assert (g - expected_grad).abs().max() <= 1e-5 * expected_grad.abs().max() + 1e-6 * largest, full


def compiled(segments: Any, **settings: Any) -> Program:
    given = {"precision": "fp32", "device": "cpu", "bucket_size": 5000, **settings}
    return zfunc.compile(segments, **given)


def tokens(rows: int = 4, seed: int = 0) -> Tensor:
    """With some that pad: their embedding gets no gradient."""
    return torch.randint(0, VOCAB, (rows, 13), generator=torch.Generator().manual_seed(seed))


def unequal(rows: int = 8) -> tuple[Tensor, Tensor]:
    """Rows padded at the end: of 12 tokens, 12, 10, 8, ... count, and none in the last two."""
    x = tokens(rows)
    labels = x[:, 1:].clone()
    for r in range(rows):
        labels[r, max(0, 12 - 2 * r) :] = IGNORED
    return x[:, :-1], labels


def layers(name: str, ids: Any) -> Iterator[tuple[zfunc.Segment, dict[str, Tensor], Any]]:
    """The different layers of a model, their values and their inputs."""
    segments = cut(name)
    values = {k: t for segment in segments for k, t in segment.initial(0).items()}
    seen, x = list[zfunc.Segment](), ids
    for n, segment in enumerate(segments[:-1]):
        if n and not any(segment.like(other) for other in seen):
            seen.append(segment)
            yield segment, values, x
        x = segment.function({**{k: values[v] for k, v in segment.by_short.items()}, **segment.constants}, x)


def rows(documents: bool, tokens: int = 32) -> Any:
    ids = torch.randint(VOCAB, (2, tokens), generator=torch.Generator().manual_seed(0))
    places = torch.cat([torch.arange(tokens - 12), torch.arange(12)]).expand(2, tokens)
    return {"input_ids": ids, "position_ids": places} if documents else ids
