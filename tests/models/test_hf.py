"""Laws of `zfunc.hf`: the model's own loss and gradients, weights from a folder and back, labels weighed right."""

import copy
import importlib
import json
import os
import re
import sys
import types
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zfunc
import zfunc.models.hf
from zfunc.cli.main import main
from zfunc.engine.program import Program
from zfunc.engine.vjp import SegmentWeights
from zfunc.errors import CheckpointError
from zfunc.models.hf.families import FAMILIES, MISSING
from zfunc.models.kv_cache import KVCache

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
T5 = {"vocab_size": 8, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
FALCON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
DEEPSEEK_SIZE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
DEEPSEEK_SIZE |= {"moe_intermediate_size": 8, "first_k_dense_replace": 0, "q_lora_rank": 8, "kv_lora_rank": 8}
DEEPSEEK_SIZE |= {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
ROUTED = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.5}
TYPES = ["sliding_attention", "full_attention", "sliding_attention"]


def config(kind: str, **given: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, f"{kind}Config")(**given)


CONFIGS: dict[str, Callable[[], Any]] = {
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
    "Mistral, window": config("Mistral", **SIZE, sliding_window=5),
    "Mistral, long window": config("Mistral", **SIZE, sliding_window=500),
    "Qwen2": config("Qwen2", **SIZE, use_sliding_window=True, sliding_window=4, max_window_layers=1),
    "Qwen3": config("Qwen3", **SIZE, head_dim=12),
    "Gemma": config("Gemma", **SIZE | {"num_key_value_heads": 1}, head_dim=16),
    "Gemma 2": config("Gemma2", **SIZE, head_dim=16, sliding_window=4),
    "Gemma 3": config("Gemma3Text", **SIZE, head_dim=16, sliding_window=4, layer_types=TYPES),
    "GPT-NeoX": config("GPTNeoX", **SIZE, hidden_dropout=0.0),
    "Phi-3": config("Phi3", **SIZE, sliding_window=5),
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
FIRST = {type(make()): name for name, make in reversed(CONFIGS.items())}.values()  # of each class
# Whose layers are made of what a layer of Llama, or of another family that is traced, is made of.
TRACED_AT_NIGHT = {"Mistral, window", "Qwen2", "Qwen3", "Gemma", "GPT-NeoX", "Phi-3", "OLMo 2", "Gemma 3"}
REPEATS = {"GPT-2 untied", "Llama, linear positions", "Llama, YaRN", "Mistral, long window"}


def slow_but(kept: Collection[str]) -> pytest.MarkDecorator:
    marks = [pytest.param(x, marks=[] if x in kept else pytest.mark.slow) for x in CONFIGS]
    return pytest.mark.parametrize("name", marks)


def random_model(name: str, **given: Any) -> Any:
    """A model of random weights, norms and biases too."""
    torch.manual_seed(0)
    return perturbed(transformers.AutoModelForCausalLM.from_config(CONFIGS[name](**given)))


def perturbed(model: Any) -> Any:
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model


def compiled(segments: Any, **settings: Any) -> Program:
    given = {"precision": "fp32", "device": "cpu", "bucket_size": 5000, **settings}
    return zfunc.compile(segments, **given)


def tokens(rows: int = 4, seed: int = 0) -> Tensor:
    """With some that pad: their embedding gets no gradient."""
    return torch.randint(0, VOCAB, (rows, 13), generator=torch.Generator().manual_seed(seed))


def gradients(program: Program, inputs: Any, targets: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Through the passes a step runs, each segment's backward traced."""
    values = {name: t for s in program.segments for name, t in s.initial(0).items()}
    x, kept = inputs, []
    for call in program.calls:
        trained, fixed = ({k: values[v] for k, v in names.items()} for names in (call.trained, call.fixed))
        weights = SegmentWeights(trained, {**fixed, **call.constants})
        given = (x, targets) if call is program.calls[-1] else (x,)
        x, residuals = call.passes.forward(weights, given)
        kept.append((call, weights, given, residuals))
    total: dict[str, Tensor] = {}
    cotangents = [torch.ones_like(x)]
    for call, *held in reversed(kept):
        grads, cotangents = call.passes.backward(*held, cotangents)
        for short, g in grads.items():
            full = call.trained[short]
            total[full] = total[full] + g if full in total else g
    return x.detach(), total


def test_every_family_has_a_configuration_here_and_a_name_on_the_page() -> None:
    classes = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    assert {classes[type(make())].__name__ for make in CONFIGS.values()} == {*FAMILIES}
    page = re.sub("[- ]", "", (Path(__file__).parents[2] / "docs" / "huggingface.md").read_text()).lower()
    assert [x for x in FAMILIES if re.sub("ForCausalLM|LMHeadModel", "", x).lower() not in page] == []


# --- segments ---------------------------------------------------------------------------------------------


def assert_own(model: Any, *, rounding: float, **settings: Any) -> None:
    """Loss and gradients of a program are the model's own, to this share of the largest of a tensor."""
    x = tokens()
    shifted = torch.cat([x[:, 1:], torch.full_like(x[:, :1], IGNORED)], 1)  # routers count every token
    program = compiled(zfunc.hf.segments(model), **settings)
    assert_gradients(program, model, x, shifted, model(x, labels=x).loss, rounding)


def assert_gradients(
    program: Program, model: Any, inputs: Any, targets: Any, expected: Tensor, rounding: float
) -> None:
    named = {
        name: p for name, p in model.named_parameters() if name in {x.name for x in program.layout.spans}
    }
    own = dict(zip(named, torch.autograd.grad(expected, list(named.values())), strict=True))
    loss, grads = gradients(program, inputs, targets)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0)
    assert grads.keys() == own.keys()
    largest = max(float(g.abs().max()) for g in own.values())
    for full, g in own.items():
        near = rounding * float(g.abs().max()) + 1e-7 * largest  # a small gradient is the rest of larger ones
        assert float((grads[full] - g).abs().max()) <= near, full
        # Or equal gradients would mean little. (Attention without positions ignores a bias of its keys.)
        assert g.abs().max() > 1e-6 or full.endswith(("key.bias", "k_proj.bias")), full


@pytest.mark.parametrize(
    ("name", "recompute"),
    [
        *((x, "all") for x in FIRST if x not in TRACED_AT_NIGHT),
        *((x, "none") for x in CONFIGS if x in TRACED_AT_NIGHT or x not in {*FIRST, *REPEATS}),
        *(pytest.param(x, "all", marks=pytest.mark.slow) for x in FIRST if x in TRACED_AT_NIGHT),
        *(pytest.param(x, "none", marks=pytest.mark.slow) for x in CONFIGS if x in REPEATS),
    ],
)
def test_loss_and_every_gradient_are_the_models_own(
    name: str, recompute: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """By traced passes, one of each kind of layer by day and of each family by night; the others by plain ones."""
    assert_own(random_model(name), rounding=1e-5, recompute=recompute)
    assert "cannot be traced" not in caplog.text


@pytest.mark.parametrize("name", ["Gemma 2", pytest.param("Qwen2", marks=pytest.mark.slow)])
def test_gradients_do_not_depend_on_recomputation(name: str) -> None:
    assert_own(random_model(name), rounding=1e-4, recompute="min-cut")


def test_a_layer_with_a_config_of_its_own_keeps_its_window() -> None:
    model = random_model("Mistral, window")
    for layer in model.model.layers:
        layer.self_attn.config = copy.deepcopy(model.config)
    assert_own(model, rounding=1e-5)


@slow_but(FIRST)
def test_cached_keys_and_values_give_the_logits_of_the_whole_sequence(name: str) -> None:
    def logits(ids: Tensor, *more: KVCache) -> Tensor:
        x = ids
        for s, segment in enumerate(cut):
            values = {short: segment.origins[full].detach() for short, full in segment.by_short.items()}
            x = segment.evaluation({**values, **segment.constants}, x, *more[s : s + 1])
        return x

    cut, ids = zfunc.hf.segments(random_model(name)), tokens(1)
    caches = [KVCache() for _ in cut[:-1]]
    parts = [
        logits(ids[:, :7], *caches),
        *(logits(ids[:, n : n + 1], *caches) for n in range(7, ids.shape[1])),
    ]
    assert torch.allclose(torch.cat(parts, 1), logits(ids), atol=1e-5)
    with pytest.raises(ValueError, match="expected one: give one at a time"):
        logits(ids[:, :2], *caches)


@pytest.mark.parametrize(("name", "distinct"), [("GPT-2", 3), ("Llama", 3), ("Gemma", 3), ("Gemma 3", 4)])
def test_equal_layers_share_one_trace(name: str, distinct: int) -> None:
    program = compiled(zfunc.hf.segments(random_model(name)))
    assert len(program.calls) == 5
    assert len({id(call.passes) for call in program.calls}) == distinct


def test_steps_equal_plain_pytorch() -> None:
    model, reference = random_model("GPT-2"), random_model("GPT-2")
    settings = {"lr": 3e-3, "betas": (0.9, 0.99), "eps": 1e-5, "weight_decay": 0.1}
    plain = torch.optim.AdamW(reference.parameters(), **settings)
    program = compiled(zfunc.hf.segments(model), optimizer=zfunc.AdamW(**settings), clip_norm=0.5)
    state = zfunc.init(program)
    for i in range(3):
        x = tokens(4, i)
        loss = reference(x, labels=x).loss
        plain.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        plain.step()
        state, metrics = zfunc.train_step(program, state, (x[:, :-1], x[:, 1:]))
        assert abs(metrics.loss - float(loss.detach())) < 1e-5
    trained = zfunc.params(program, state)
    for full, p in reference.named_parameters():
        # Attention ignores a bias of its keys: that gradient is rounding alone, and eps is what keeps it small.
        assert float((trained[full] - p.detach()).abs().max()) < 1e-5, full
    untouched = random_model("GPT-2").parameters()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), untouched, strict=True))


def test_a_model_in_bf16_trains() -> None:
    program = compiled(zfunc.hf.segments(random_model("Gemma")), precision="bf16", micro_batches=2)
    state, losses = zfunc.init(program), []
    for _ in range(8):
        state, metrics = zfunc.train_step(program, state, (tokens(4)[:, :-1], tokens(4)[:, 1:]))
        losses.append(metrics.loss)
    assert losses[-1] < losses[0] - 0.03


def test_frozen_parameters_stay_and_dropout_is_for_training_alone() -> None:
    torch.manual_seed(0)
    # As from_pretrained gives it.
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)).eval()
    model.transformer.h[0].requires_grad_(False)
    program = compiled(zfunc.hf.segments(model))
    state, batch = zfunc.init(program), (tokens()[:, :-1], tokens()[:, 1:])
    before = zfunc.evaluate(program, state, batch)
    assert before == zfunc.evaluate(program, state, batch)
    assert abs(before - float(model(tokens(), labels=tokens()).loss.detach())) < 1e-5
    state, metrics = zfunc.train_step(program, state, batch)
    assert abs(metrics.loss - before) > 1e-4
    after = zfunc.params(program, state)
    for full, p in model.named_parameters():
        assert torch.equal(after[full], p) == full.startswith("transformer.h.0."), full
    assert not model.training


@pytest.mark.parametrize(
    "name", ["GPT-2", "Llama 3 positions", pytest.param("Gemma 3", marks=pytest.mark.slow)]
)
def test_meta_models_get_real_constants_and_initial_values(name: str) -> None:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]())
    cut, real = zfunc.hf.segments(model), zfunc.hf.segments(random_model(name))
    for a, b in zip(cut, real, strict=True):
        assert a.constants.keys() == b.constants.keys()
        assert all(torch.equal(a.constants[k], t) for k, t in b.constants.items())
        assert a.initial(3).keys() == b.initial(3).keys()
        assert all(torch.equal(t, a.initial(3)[k]) for k, t in a.initial(3).items())
    table = next(iter(cut[0].initial(3).values()))
    assert not torch.equal(table, next(iter(cut[0].initial(4).values())))
    assert 0.018 < float(table[1:].std()) < 0.022  # initializer_range
    program = compiled(cut)
    loss = zfunc.evaluate(program, zfunc.init(program), (tokens()[:, :-1], tokens()[:, 1:]))
    assert 3 < loss < 6


class Turned(torch.nn.Module):
    """Rotary positions that depend on the embeddings, which no layer is given."""

    def __init__(self, rotary: torch.nn.Module) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, x: Tensor, *positions: Tensor, **named: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.rotary(x, *positions, **named)
        return cos * (1 + x.mean()), sin


def refused() -> dict[str, Any]:
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    bloom = {"vocab_size": VOCAB, "hidden_size": 8, "n_head": 2, "n_layer": 1}
    llama = config("Llama", **SIZE | {"num_hidden_layers": 1})()
    torch.manual_seed(0)  # which parameter is the first that differs depends on the values
    granite = perturbed(transformers.GraniteForCausalLM(config("Granite", **SIZE)()))
    granite.model.rotary_emb = Turned(granite.model.rotary_emb)
    return {
        "expected a model of transformers": torch.nn.Linear(1, 1),
        "encoder and a decoder, expected a causal": transformers.T5Model(config("T5", **T5)()),
        "no next-token loss of its own: pass loss=": transformers.LlamaModel(llama),
        "rotary positions of type 'dynamic': use one of default, linear": transformers.LlamaForCausalLM(
            config("Llama", **SIZE, rope_parameters=dynamic)()
        ),
        r"in segments \(.* autograd.Function .*zfunc\.segment\(": transformers.BloomForCausalLM(
            config("Bloom", **bloom)()
        ),
        r"in segments \(another gradient of .model.embed_tokens": granite,
    }


def test_unsupported_models_are_refused_with_what_to_do() -> None:
    for message, model in refused().items():
        with pytest.raises(ValueError, match=f"^model: got a {type(model).__name__}.*{message}"):
            zfunc.hf.segments(model)


DEEPSEEK = config("DeepseekV3", **SIZE | DEEPSEEK_SIZE | {"num_hidden_layers": 1, "num_key_value_heads": 4})
OTHERS: dict[str, Callable[[], Any]] = {
    "Granite": config("Granite", **SIZE, logits_scaling=3.0, embedding_multiplier=2.0),
    "Falcon": config("Falcon", **FALCON),
}


@pytest.mark.parametrize("name", ["Granite", pytest.param("Falcon", marks=pytest.mark.slow)])
def test_any_other_model_is_compared_with_its_segments_first(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "zfunc")
    model = transformers.AutoModelForCausalLM.from_config(OTHERS[name]())
    assert_own(perturbed(model), rounding=1e-5)
    assert f"the segments of a {type(model).__name__} have its loss and gradients" in caplog.text


@pytest.mark.parametrize("name", [pytest.param("Granite", marks=pytest.mark.slow), "Falcon"])
def test_a_model_that_does_not_keep_documents_apart_refuses_them(name: str) -> None:
    model = transformers.AutoModelForCausalLM.from_config(OTHERS[name]())
    program = compiled(zfunc.hf.segments(model))
    batch = zfunc.hf.batch({"input_ids": tokens(), "position_ids": torch.arange(13).expand(4, 13)}, tokens())
    if name == "Granite":
        assert zfunc.evaluate(program, zfunc.init(program), batch) > 0
    else:
        with pytest.raises(ValueError, match="position_ids of several documents, which a FalconForCausalLM"):
            zfunc.evaluate(program, zfunc.init(program), batch)


ENCODERS: dict[str, tuple[Callable[[], Any], Any]] = {
    "BERT": (
        lambda: transformers.BertForSequenceClassification(
            config("Bert", **SIZE, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)()
        ),
        {"input_ids": tokens(), "attention_mask": torch.arange(13) < torch.tensor([[13], [7], [9], [2]])},
    ),
    "ViT": (
        lambda: transformers.ViTForImageClassification(
            config("ViT", **SIZE, num_labels=3, image_size=8, patch_size=4, num_channels=2)()
        ),
        torch.randn(4, 2, 8, 8, generator=torch.Generator().manual_seed(0)),
    ),
}


@pytest.mark.parametrize("name", ["BERT", pytest.param("ViT", marks=pytest.mark.slow)])
def test_encoders_have_a_loss_of_the_users(name: str) -> None:
    model, (x, targets) = perturbed(ENCODERS[name][0]()), (ENCODERS[name][1], torch.tensor([0, 2, 1, 1]))

    def loss(output: Any, targets: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(output.logits, targets)

    with pytest.raises(ValueError, match="^example: got none with a loss, expected a tiny batch"):
        zfunc.hf.segments(model, loss=loss)
    segments = zfunc.hf.segments(model, loss=loss, example=(x, targets))
    output = model(**x) if isinstance(x, dict) else model(x)
    assert_gradients(compiled(segments), model, x, targets, loss(output, targets), 1e-5)
    program = compiled(segments, micro_batches=2)
    _, metrics = zfunc.train_step(program, zfunc.init(program), (x, targets))
    assert abs(metrics.loss - float(loss(output, targets).detach())) < 1e-5


def test_a_folder_of_another_kind_is_not_supported_rather_than_damaged(tmp_path: Path) -> None:
    transformers.T5Model(config("T5", **T5)()).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match="^model: got a T5Model, which is none, expected a causal language model"
    ):
        zfunc.hf.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "meta-llama/Llama-3.2-1B",
            "hf download meta-llama/Llama-3.2-1B --local-dir Llama-3.2-1B, then name",
        ),
        ("gpt2", "hf download gpt2 --local-dir gpt2, then name"),
        ("runs/of/last/week", "use a folder that save_pretrained"),
        ("/nowhere", "use a folder that save_pretrained"),
    ],
)
def test_a_name_on_the_hub_gets_the_command_that_downloads_it(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=f"^{name}: got no config.json in it.*{message}"):
        zfunc.hf.load(name)


def test_more_tokens_than_positions_are_refused_before_anything_runs() -> None:
    program = compiled(zfunc.hf.segments(random_model("GPT-2")))
    x = torch.zeros(1, 33, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"'transformer\.wte': got 33 tokens, expected at most the 32"):
        zfunc.train_step(program, zfunc.init(program), (x, x))


def test_without_transformers_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = random_model("Llama")
    monkeypatch.setitem(sys.modules, "transformers", None)
    for call in (lambda: zfunc.hf.segments(model), lambda: zfunc.hf.load(tmp_path)):
        with pytest.raises(ImportError, match=MISSING.split("'")[0]):
            call()
    monkeypatch.setitem(sys.modules, "transformers", types.SimpleNamespace(__version__="5.11.1"))
    with pytest.raises(ImportError, match=r"got transformers 5\.11\.1, expected version 5\.12 or newer"):
        zfunc.hf.segments(model)
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(zfunc.models, "hf", None)
    for name in [name for name in sys.modules if name.startswith("zfunc.models.hf")]:
        monkeypatch.delitem(sys.modules, name)
    assert callable(importlib.import_module("zfunc.models.hf").batch)


# --- labels that do not count -----------------------------------------------------------------------------


def unequal(rows: int = 8) -> tuple[Tensor, Tensor]:
    """Rows padded at the end: of 12 tokens, 12, 10, 8, ... count, and none in the last two."""
    x = tokens(rows)
    labels = x[:, 1:].clone()
    for r in range(rows):
        labels[r, max(0, 12 - 2 * r) :] = IGNORED
    return x[:, :-1], labels


@pytest.mark.parametrize("micro_batches", [4, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 8))])
def test_the_loss_does_not_depend_on_micro_batches(micro_batches: int) -> None:
    model = random_model("Llama")
    ids, labels = unequal()
    expected = torch.nn.functional.cross_entropy(model(ids).logits.flatten(0, 1), labels.flatten())
    own = torch.autograd.grad(expected, list(model.parameters()))
    norm = float(torch.stack([g.square().sum() for g in own]).sum().sqrt())
    program = compiled(zfunc.hf.segments(model), micro_batches=micro_batches)
    batch = zfunc.hf.batch(ids, labels)
    state = zfunc.init(program)
    assert abs(zfunc.evaluate(program, state, batch) - float(expected.detach())) < 1e-6
    _, metrics = zfunc.train_step(program, state, batch)
    assert abs(metrics.loss - float(expected.detach())) < 1e-6
    assert abs(metrics.grad_norm - norm) < 1e-5 * norm


def test_losses_of_ranks_average_to_that_of_the_batch() -> None:
    ids, labels = unequal()
    program = compiled(zfunc.hf.segments(random_model("Llama")))
    state = zfunc.init(program)
    whole = zfunc.evaluate(program, state, zfunc.hf.batch(ids, labels))
    per_row = int((labels != IGNORED).sum()) / 8
    halves = [zfunc.hf.batch(ids[r], labels[r], tokens_per_row=per_row) for r in (slice(4), slice(4, 8))]
    assert abs(sum(zfunc.evaluate(program, state, half) for half in halves) / 2 - whole) < 1e-6


def test_invalid_batches_are_refused() -> None:
    ids, labels = unequal()
    with pytest.raises(ValueError, match=r"labels\[:, t\] is the token that follows"):
        zfunc.hf.batch(ids, labels[:, 1:])
    with pytest.raises(ValueError, match="no token that counts"):
        zfunc.hf.batch(ids[6:], labels[6:])


# --- folders ----------------------------------------------------------------------------------------------


def write(model: Any, folder: Path, **given: Any) -> Path:
    model.save_pretrained(folder, **given)
    return folder


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    save_file({k: v.clone() for k, v in change(load_file(file)).items()}, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("name", "shards"),
    [("GPT-2", True), ("GPT-NeoX", False), ("Gemma 3", True), ("Mixtral", True), ("Qwen3 MoE", False)],
)
def test_a_folder_gives_its_models_weights_and_logits(name: str, shards: bool, tmp_path: Path) -> None:
    model = random_model(name)
    folder = write(model, tmp_path / "m", **({"max_shard_size": "20KB"} if shards else {}))
    assert (folder / "model.safetensors.index.json").exists() == shards
    config, cut = zfunc.hf.load(folder)
    assert config.model_type == model.config.model_type
    program = compiled(cut)
    state = zfunc.init(program)
    values = zfunc.params(program, state)
    assert values.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(values[full], p) for full, p in model.named_parameters())
    assert torch.allclose(zfunc.apply(program, state, tokens()), model(tokens()).logits, atol=1e-5)


def test_weights_in_bf16_become_fp32_exactly(tmp_path: Path) -> None:
    model = random_model("Llama tied").to(torch.bfloat16)
    program = compiled(zfunc.hf.load(write(model, tmp_path / "m"))[1])
    values = zfunc.params(program, zfunc.init(program))
    assert all(torch.equal(values[full], p.float()) for full, p in model.named_parameters())


def test_initial_values_are_the_mapped_file_and_let_go_of_it(tmp_path: Path) -> None:
    file = write(random_model("Llama"), tmp_path / "m") / "model.safetensors"

    def mapped() -> list[tuple[int, int]]:
        lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
        return [tuple(int(x, 16) for x in ws[0].split("-")) for ws in lines if ws[-1] == str(file)]  # type: ignore

    _, cut = zfunc.hf.load(tmp_path / "m")
    assert not mapped()
    values = cut[1].initial(0)
    ranges = mapped()
    assert len(values) == 9
    for t in values.values():
        assert any(low <= t.data_ptr() and t.data_ptr() + t.nbytes <= high for low, high in ranges)
    del values, t
    program = compiled(cut)
    zfunc.init(program)
    assert not mapped()


def test_names_of_a_model_without_its_head_and_old_buffers_are_known(tmp_path: Path) -> None:
    model = random_model("GPT-2")
    folder = write(model, tmp_path / "m")
    mask = torch.ones(1, 1, 8, 8)
    rewrite(
        folder, lambda t: {**{k.removeprefix("transformer."): v for k, v in t.items()}, "h.0.attn.bias": mask}
    )
    program = compiled(zfunc.hf.load(folder)[1])
    assert torch.allclose(
        zfunc.apply(program, zfunc.init(program), tokens()), model.eval()(tokens()).logits, atol=1e-5
    )


FLAWS: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = {
    "missing": (
        lambda t: {k: v for k, v in t.items() if k != "model.norm.weight"},
        r"got no 'model\.norm\.weight' \(did you mean",
    ),
    "renamed": (
        lambda t: {k.replace("model.norm.w", "model.nrom.w"): v for k, v in t.items()},
        r"got 'model\.nrom\.weight' \(did you mean 'model\.norm\.weight'\?\), which the model does not have",
    ),
    "extra": (lambda t: {**t, "score.weight": torch.ones(2)}, "got 'score.weight'.*which the model does not"),
    "shape": (
        lambda t: {**t, "lm_head.weight": torch.ones(3, 32)},
        r"'lm_head\.weight' of shape \(3, 32\), expected \(61, 32\)",
    ),
    "type": (lambda t: {k: v.to(torch.int8) for k, v in t.items()}, "in I8, expected F64, F32, BF16, F16"),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_folder_of_another_model_is_refused_by_name_before_anything_is_read(
    flaw: str, tmp_path: Path
) -> None:
    folder = write(random_model("Llama"), tmp_path / "m")
    rewrite(folder, FLAWS[flaw][0])
    with pytest.raises(CheckpointError, match=FLAWS[flaw][1]):
        zfunc.hf.load(folder)


def test_a_head_that_is_tied_but_stored_otherwise_is_refused(tmp_path: Path) -> None:
    model = random_model("Llama tied")
    folder = write(model, tmp_path / "m")
    rewrite(folder, lambda t: {**t, "lm_head.weight": t["model.embed_tokens.weight"]})
    program = compiled(zfunc.hf.load(folder)[1])
    assert zfunc.init(program).step == 0
    rewrite(folder, lambda t: {**t, "lm_head.weight": t["lm_head.weight"] + 1})
    with pytest.raises(
        CheckpointError, match="other values in 'model.embed_tokens.weight'|tie_word_embeddings"
    ):
        zfunc.init(compiled(zfunc.hf.load(folder)[1]))


def test_an_incomplete_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        zfunc.hf.load(tmp_path)
    folder = write(random_model("Llama"), tmp_path / "m", max_shard_size="20KB")
    index = folder / "model.safetensors.index.json"
    text = index.read_text()
    shard = folder / (file := json.loads(text)["weight_map"]["model.norm.weight"])
    index.write_text(
        text.replace(f'"model.norm.weight": "{file}"', '"model.norm.weight": "../x.safetensors"')
    )
    with pytest.raises(CheckpointError, match="which is not in the folder"):
        zfunc.hf.load(folder)
    index.write_text(text)
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="cannot be read"):
        zfunc.hf.load(folder)
    index.unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        zfunc.hf.load(folder)


def trained(folder: Path, **settings: Any) -> tuple[Program, Any]:
    program = compiled(zfunc.hf.load(folder)[1], **settings)
    state, _ = zfunc.train_step(program, zfunc.init(program), zfunc.hf.batch(*unequal()))
    return program, state


@pytest.mark.parametrize(
    "name",
    ["GPT-2", *(pytest.param(x, marks=pytest.mark.slow) for x in ("Gemma 3", "Llama", "Qwen3", "Mixtral"))],
)
def test_from_pretrained_loads_a_saved_folder_with_equal_logits(name: str, tmp_path: Path) -> None:
    folder = write(random_model(name), tmp_path / "m")
    (folder / "tokenizer.json").write_text("{}")
    program, state = trained(folder)
    assert zfunc.hf.save(tmp_path / "saved", program, state, config=folder) == tmp_path / "saved"
    zfunc.save(tmp_path / "run", program, state)
    done = zfunc.hf.export(tmp_path / "run", tmp_path / "exported", config=folder)
    assert (done.path, done.step, done.dtype) == (tmp_path / "exported", 1, "fp32")
    expected = zfunc.apply(program, state, tokens())
    for out in (tmp_path / "saved", tmp_path / "exported"):
        assert (out / "tokenizer.json").read_text() == "{}"
        model = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
        assert model.dtype == torch.float32
        weights = zfunc.params(program, state)
        assert all(torch.equal(weights[full], p) for full, p in model.named_parameters())
        assert torch.allclose(model(tokens()).logits, expected, atol=1e-5)
        zfunc.hf.load(out)
    assert sorted(x.name for x in tmp_path.iterdir()) == ["exported", "m", "run", "saved"]


def test_buffers_that_transformers_saves_are_read_and_written(tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_config(DEEPSEEK())
    bias = model.model.layers[0].mlp.gate.e_score_correction_bias.copy_(torch.tensor([3.0, 0.1, 2.0, 0.0]))
    folder = write(model, tmp_path / "m")
    program = compiled(zfunc.hf.load(folder)[1])
    state = zfunc.init(program)
    expected = model.eval()(tokens()).logits
    assert torch.allclose(zfunc.apply(program, state, tokens()), expected, atol=1e-5)
    zfunc.hf.save(tmp_path / "saved", program, state, config=folder)
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(saved.model.layers[0].mlp.gate.e_score_correction_bias, bias)
    with pytest.raises(ValueError, match="^config: got one of a model that saves .*expected its folder"):
        zfunc.hf.save(tmp_path / "other", program, state, config=model.config)


def test_a_folder_in_bf16_says_so_and_moments_do_not_matter(tmp_path: Path) -> None:
    folder = write(random_model("Llama tied"), tmp_path / "m")
    program, state = trained(folder, optimizer=zfunc.AdamW(moments="8bit"))
    out = zfunc.hf.save(tmp_path / "saved", program, state, config=zfunc.hf.load(folder)[0], dtype="bf16")
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    weights = zfunc.params(program, state)
    assert model.dtype == torch.bfloat16
    assert all(torch.equal(weights[full].bfloat16(), p) for full, p in model.named_parameters())


def test_a_folder_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    folder = write(random_model("Llama"), tmp_path / "m")
    other = write(random_model("Llama tied"), tmp_path / "other")
    program, state = trained(folder)
    checkpoint = zfunc.save(tmp_path / "run", program, state)
    new = tmp_path / "x"
    calls: dict[str, Callable[[], Any]] = {
        "which exists, expected a new folder": lambda: zfunc.hf.save(folder, program, state, config=folder),
        "'lm_head.weight' of shape None.*pass the config that the segments": lambda: zfunc.hf.save(
            new, program, state, config=other
        ),
        "pass the config that the segments": lambda: zfunc.hf.export(checkpoint, new, config=other),
        r"got 'bf61', expected one of .* \(did you mean 'bf16'\?\)": lambda: zfunc.hf.export(
            checkpoint,
            new,
            config=folder,
            dtype="bf61",  # type: ignore
        ),
        "make .*nowhere": lambda: zfunc.hf.export(checkpoint, tmp_path / "nowhere" / "x", config=folder),
    }
    for message, call in calls.items():
        with pytest.raises(ValueError, match=message):
            call()
    with torch.no_grad():
        big = {name: t * 1e6 for name, t in zfunc.params(program, state).items()}
    with pytest.raises(ValueError, match="too large for fp16"):
        zfunc.hf.save(tmp_path / "x", program, zfunc.init(program, params=big), config=folder, dtype="fp16")
    assert sorted(os.listdir(tmp_path)) == ["m", "other", "run"]


def test_the_command_exports_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, run, out = write(random_model("Llama"), tmp_path / "m"), tmp_path / "run", tmp_path / "out"
    zfunc.save(run, *trained(folder))
    assert main(["export", str(run), "--hf", str(folder), "--out", str(out), "--dtype", "bf16"]) == 0
    assert f"written: {out}: 30 parameters of step 1 as bf16" in capsys.readouterr().out
    assert transformers.AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16
    assert main(["export", str(run), "--hf", str(folder)]) == 2
    assert "expected a new folder to write: pass such as --out trained" in capsys.readouterr().err
