"""Segments of a model of transformers have its own loss and gradients."""

import copy
import functools
import importlib
import re
import sys
import types
from collections.abc import Callable, Collection
from contextvars import ContextVar
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import (
    CONFIGS,
    DEEPSEEK,
    EXPERTS,
    GEMMA_4,
    GEMMA_IMAGES,
    GPT2,
    HYBRIDS,
    IGNORED,
    MIXED,
    SIZE,
    T5,
    VOCAB,
    assert_plain,
    compiled,
    config,
    cut,
    model_of,
    perturbed,
    random_model,
    tokens,
    transformers,
    unequal,
)
from hypothesis import example, given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import Tensor

import zfunc
import zfunc.models.hf
from zfunc.engine.program.program import Program
from zfunc.engine.trace.segment_vjp import SegmentWeights
from zfunc.models.hf import recording
from zfunc.models.hf.attention import PastTokens, inputs_given
from zfunc.models.hf.cutting import RECORDED
from zfunc.models.hf.experts import run_all_experts
from zfunc.models.hf.families import FAMILIES, MISSING
from zfunc.models.sequences import KVCache

FIRST = {type(make()): name for name, make in reversed(CONFIGS.items())}.values()  # of each class
# Whose layers are made of what a layer of Llama, or of another family that is traced, is made of.
TRACED_AT_NIGHT = {"Mistral, window", "Qwen2", "Qwen3", "Gemma", "GPT-NeoX", "Phi-3", "OLMo 2", "Gemma 3"}
TRACED_AT_NIGHT |= {"Qwen3 MoE"}
REPEATS = {"GPT-2 untied", "Llama, linear positions", "Llama, YaRN", "Mistral, long window"}
BY_LENGTH = ("Llama, dynamic positions", "Gemma 3, dynamic positions", "Phi-3, long positions")  # 8 are short
SLOW = pytest.mark.slow


def by_day(*names: str, of: Collection[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("name", [pytest.param(x, marks=[SLOW] * (x not in names)) for x in of])


def gradients(program: Program, inputs: Any, targets: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Through the passes a step runs, each segment's backward traced."""
    values = {name: t.to(program.dtype) for s in program.segments for name, t in s.initial(0).items()}
    x, kept = inputs, []
    for call, segment in zip(program.calls, program.segments, strict=True):
        trained, fixed = ({k: values[v] for k, v in names.items()} for names in (call.trained, call.fixed))
        weights = SegmentWeights(trained, {**fixed, **segment.constants})
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
    ("name", "recompute", "rounding"),
    [
        *((x, "all", 1e-5) for x in FIRST if x not in {*TRACED_AT_NIGHT, "Gemma 2"}),
        *(
            pytest.param(x, "none", 1e-5, marks=[SLOW] * (x in BY_LENGTH))
            for x in CONFIGS
            if x in TRACED_AT_NIGHT or x not in {*FIRST, *REPEATS}
        ),
        ("Gemma 2", "min-cut", 1e-4),
        pytest.param("Qwen2", "min-cut", 1e-4, marks=SLOW),
        *(pytest.param(x, "all", 1e-5, marks=SLOW) for x in (*TRACED_AT_NIGHT, "Gemma 2")),
        *(pytest.param(x, "none", 1e-5, marks=SLOW) for x in CONFIGS if x in REPEATS),
    ],
)
def test_loss_and_every_gradient_are_the_models_own(
    name: str, recompute: Any, rounding: float, caplog: pytest.LogCaptureFixture
) -> None:
    """By traced passes, one of each kind of layer by day and of each family by night; the others by plain ones."""
    assert_own(random_model(name), rounding=rounding, recompute=recompute)
    assert "cannot be traced" not in caplog.text


WINDOWS = (4, RECORDED - 1, RECORDED, RECORDED + 1, 2 * RECORDED)


@pytest.mark.parametrize(
    ("name", "window"),
    [
        pytest.param(name, n, marks=[SLOW] * (n != 2 * RECORDED and name != "Qwen2"))
        for name in MIXED
        for n in WINDOWS
    ],
)
def test_windows_and_chunks_of_any_length_are_those_of_their_layers(name: str, window: int) -> None:
    """Longer than the rows on which a model is recorded, too, where no token is hidden by them."""
    model = model_of(MIXED[name](window))
    x = torch.randint(VOCAB, (2, 3 * RECORDED), generator=torch.Generator().manual_seed(0))
    segments = zfunc.hf.segments(model)
    assert len({id(s.module) for s in segments}) > 3  # two kinds of layers
    (ids, targets) = segments[-1].read_dict({"input_ids": x, "labels": x})
    assert_plain(segments, model, ids, targets, model(x, labels=x).loss)


def test_the_comparison_sees_a_window_that_a_recording_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on rows so short that there is no mask for a window, as for none."""
    monkeypatch.setattr(recording, "RECORDING", ContextVar("unread"))
    with pytest.raises(ValueError, match="computes something else in segments"):
        zfunc.hf.segments(model_of(MIXED["Cohere2"](512)))


def test_a_layer_with_a_config_of_its_own_keeps_its_window() -> None:
    model = random_model("Mistral, window")
    for layer in model.model.layers:
        layer.self_attn.config = copy.deepcopy(model.config)
    assert_own(model, rounding=1e-5, recompute="none")


@functools.cache
def of_tiles(name: str, tiles: int) -> tuple[Program, Any]:
    program = compiled(cut(name), tiles=tiles)
    return program, zfunc.init(program)


@by_day(BY_LENGTH[0], "Llama 4", of=[*BY_LENGTH, "Llama 4"])
@given(begins=st.sets(st.integers(1, 23), max_size=4), tiles=st.sampled_from([1, 8]))
@example(set(), 8)
@example({8, 16}, 1)  # none is longer than the positions of short rows
@example({9, 16}, 1)
@example({3, 13}, 8)  # no tile has the length
@examples(max_examples=examples.default.max_examples // 20)
def test_positions_and_chunks_follow_the_documents(name: str, begins: set[int], tiles: int) -> None:
    """As in a new model of transformers, whatever rows were before: one that is given each document alone, unless
    frequencies follow the longest document of a row. (Version 5.17 has chunks of the row.)"""
    lengths = [b - a for a, b in pairwise([0, *sorted(begins), 24])]
    places = torch.cat([torch.arange(n) for n in lengths]).expand(2, 24)
    ids = torch.randint(VOCAB, (2, 24), generator=torch.Generator().manual_seed(len(lengths)))
    model = random_model(name)
    if name in BY_LENGTH:
        own = model(ids, position_ids=places, use_cache=False).logits
    else:
        own = torch.cat([model(x, use_cache=False).logits for x in ids.split(lengths, 1)], 1)
    got = zfunc.apply(*of_tiles(name, tiles), {"input_ids": ids, "position_ids": places})
    torch.testing.assert_close(got, own, rtol=0, atol=1e-5)


@by_day(*FIRST, *BY_LENGTH, "LFM2", "Qwen3.5", "Falcon-H1", of=[*CONFIGS, *HYBRIDS])
def test_cached_keys_and_values_give_the_logits_of_the_whole_sequence(name: str) -> None:
    """Or of the model itself, whose positions may follow the length so far; Bamba's steps of one token differ."""

    def logits(ids: Tensor, *more: KVCache) -> Tensor:
        x = ids
        for s, segment in enumerate(segments):
            values = {short: segment.origins[full].detach() for short, full in segment.by_short.items()}
            x = segment.evaluation({**values, **segment.constants}, x, *more[s : s + 1])
        return x

    model, ids = random_model(name), tokens(1)
    past = transformers.DynamicCache(**{"config": model.config} if name in HYBRIDS else {})
    segments = zfunc.hf.segments(model)
    caches = [KVCache() for _ in segments[:-1]]
    parts = [
        logits(ids[:, :7], *caches),
        *(logits(ids[:, n : n + 1], *caches) for n in range(7, ids.shape[1])),
    ]
    own = [
        model(x, past_key_values=past).logits
        for x in ids.split([7, *6 * [1]], 1)
        if name in (*BY_LENGTH, "Bamba")
    ]
    assert torch.allclose(torch.cat(parts, 1), torch.cat(own, 1) if own else logits(ids), atol=1e-5)
    with pytest.raises(ValueError, match="expected one: give one at a time"):
        logits(ids[:, :2], *caches)


@pytest.mark.parametrize(("name", "distinct"), [("GPT-2", 3), ("Llama", 3), ("Gemma", 3), ("Gemma 3", 4)])
def test_equal_layers_share_one_trace(name: str, distinct: int) -> None:
    program = compiled(cut(name))
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
    settings = {"precision": "bf16", "micro_batches": 2, "optimizer": zfunc.AdamW(lr=1e-2)}
    program = compiled(cut("Gemma"), **settings)
    state, losses = zfunc.init(program), []
    for _ in range(3):
        state, metrics = zfunc.train_step(program, state, (tokens(4)[:, :-1], tokens(4)[:, 1:]))
        losses.append(metrics.loss)
    assert losses[-1] < losses[0] - 0.03


@pytest.mark.parametrize(("name", "glob"), [("Gemma", "*norm"), ("DeepSeek-V3", "*.gate")])
def test_norms_or_routers_in_fp32_have_the_loss_of_the_model_with_them(name: str, glob: str) -> None:
    """Where the model's own code casts what meets them."""
    torch.manual_seed(0)
    made = DEEPSEEK() if name == "DeepSeek-V3" else CONFIGS[name]()
    model = perturbed(transformers.AutoModelForCausalLM.from_config(made))
    program = compiled(zfunc.hf.segments(model), precision="bf16", fp32_params=glob)
    x, state = tokens(4), zfunc.init(program)
    for full in {x.name for bucket in program.layout.buckets if bucket.in_fp32 for x in bucket.spans}:
        owner, _, short = full.rpartition(".")
        model.get_submodule(owner).register_parameter(
            short, torch.nn.Parameter(model.get_parameter(full).double())
        )
    for p in model.parameters():
        p.data = p.data.float() if p.dtype == torch.float64 else p.data.bfloat16()
    loss = model(x, labels=x).loss
    loss.backward()
    state, metrics = zfunc.train_step(program, state, (x[:, :-1], x[:, 1:]))
    assert {p.dtype for p in model.parameters()} == {torch.float32, torch.bfloat16}
    assert metrics.loss == pytest.approx(float(loss.detach()), rel=2e-3)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), torch.inf)
    assert metrics.grad_norm == pytest.approx(float(norm), rel=2e-2)


def test_a_layer_that_refuses_parameters_in_fp32_is_named() -> None:
    model = cut("Llama")
    program, x = compiled(model, precision="bf16", fp32_params="*norm"), tokens(4)
    refused = r"segment 'model.layers.0'.*fp32_params='\*norm' keeps 'model.layers.0.input_layernorm.weight'"
    with pytest.raises(ValueError, match=refused):
        zfunc.train_step(program, zfunc.init(program), (x[:, :-1], x[:, 1:]))


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


@by_day("GPT-2", *BY_LENGTH, of=("GPT-2", "Llama 3 positions", *BY_LENGTH, "Gemma 3", "Falcon-H1"))
def test_meta_models_get_real_constants_and_initial_values(name: str) -> None:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config({**CONFIGS, **HYBRIDS}[name]())
    made, real = zfunc.hf.segments(model), cut(name)
    for a, b in zip(made, real, strict=True):
        assert a.constants.keys() == b.constants.keys()
        assert all(torch.equal(a.constants[k], t) for k, t in b.constants.items())
        assert a.initial(3).keys() == b.initial(3).keys()
        assert all(torch.equal(t, a.initial(3)[k]) for k, t in a.initial(3).items())
    table = next(iter(made[0].initial(3).values()))
    assert not torch.equal(table, next(iter(made[0].initial(4).values())))
    assert 0.018 < float(table[1:].std()) < 0.022  # initializer_range
    program = compiled(made)
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


def turned(model: Any) -> Any:
    model.model.rotary_emb = Turned(model.model.rotary_emb)
    return model


BLOOM = {"vocab_size": VOCAB, "hidden_size": 8, "n_head": 2, "n_layer": 1}


def with_rope(model: Any, kind: str) -> Any:
    model.config.rope_parameters["rope_type"] = kind
    return model


def not_causal(model: Any, **fields: Any) -> Any:
    model.config.update(fields)
    return model


REFUSED: dict[str, Callable[[], Any]] = {
    "is_causal False: set it to True": lambda: not_causal(random_model("Llama"), is_causal=False),
    "use_bidirectional_attention 'all': set it to False": lambda: not_causal(
        random_model("Llama"), use_bidirectional_attention="all"
    ),
    "expected a model of transformers": lambda: torch.nn.Linear(1, 1),
    r"an encoder-decoder, with two inputs, expected a causal.*zfunc\.segments\(": lambda: (
        transformers.T5Model(config("T5", **T5)())
    ),
    "no next-token loss of its own, expected a causal": lambda: transformers.LlamaModel(CONFIGS["Llama"]()),
    "rotary positions of type 'axial': use one of default, ": lambda: with_rope(
        random_model("Llama"), "axial"
    ),
    r"in segments \(another gradient of .model.embed_tokens": lambda: turned(
        perturbed(transformers.GraniteForCausalLM(config("Granite", **SIZE)()))
    ),
}


if hasattr(transformers, "ZayaForCausalLM"):  # whose routers read what those of the layer before made
    REFUSED[r"whose layers hand on more than hidden states, .*zfunc\.segments\("] = lambda: (
        transformers.ZayaForCausalLM(
            config("Zaya", **SIZE, **EXPERTS | {"num_experts_per_tok": 1}, router_hidden_size=8)()
        )
    )


class Scaled(torch.nn.Module):
    """An embedding scaled by its rows' size, whose gradient has residuals; `made` is what it last returned."""

    def __init__(self, embedding: torch.nn.Module) -> None:
        super().__init__()
        self.weight = embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.nn.functional.embedding(ids, self.weight)
        self.made = x * x.square().mean(-1, keepdim=True)
        return self.made


class Returned(torch.nn.Module):
    """A last norm that reads the embeddings, too, as Inkling 2's."""

    def __init__(self, norm: torch.nn.Module, embedding: Scaled) -> None:
        super().__init__()
        self.norm, self.embedding = norm, (embedding,)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.embedding[0].made)


def test_embeddings_that_the_last_segment_reads_too_are_a_weight_of_both() -> None:
    """Cutting holds loss and gradients to the model's. Both outputs of a trace have the embeddings' backward."""
    model = transformers.GraniteForCausalLM(config("Granite", **SIZE)())
    model.model.embed_tokens = Scaled(model.model.embed_tokens)
    model.model.norm = Returned(model.model.norm, model.model.embed_tokens)
    first, *_, last = zfunc.hf.segments(model)
    shared = {p.name for p in first.parameters} & {p.name for p in last.parameters}
    assert shared == {"model.embed_tokens.weight"}


@pytest.mark.parametrize("message", REFUSED)
def test_unsupported_models_are_refused_with_what_to_do(message: str) -> None:
    torch.manual_seed(0)  # which parameter is the first that differs depends on the values
    model = REFUSED[message]()
    with pytest.raises(ValueError, match=f"^model: got a {type(model).__name__}.*{message}"):
        zfunc.hf.segments(model)


@pytest.mark.parametrize("name", ["Llama", "Mistral, window"])
def test_a_module_that_is_not_causal_is_refused_where_no_mask_says_what_it_sees(name: str) -> None:
    """There transformers' own attentions differ; a mask, as of a window, is followed by each of them."""
    model, x, losses = random_model(name), tokens(), {}
    model.model.layers[1].self_attn.is_causal = False
    for own in ("eager", "sdpa"):
        model.set_attn_implementation(own)
        losses[own] = float(model(x, labels=x).loss.detach())
    program, inputs = compiled(zfunc.hf.segments(model)), (x[:, :-1], x[:, 1:])
    state = zfunc.init(program)
    if name == "Llama":
        assert losses["eager"] != pytest.approx(losses["sdpa"], rel=1e-4)
        with pytest.raises(
            ValueError, match=r"layers.1.*LlamaAttention with is_causal False, and no mask.*zfunc\."
        ):
            zfunc.train_step(program, state, inputs)
        return
    assert zfunc.evaluate(program, state, inputs) == pytest.approx(losses["eager"], rel=1e-6)


OTHERS: dict[str, Callable[[], Any]] = {
    "Granite": config("Granite", **SIZE, logits_scaling=3.0, embedding_multiplier=2.0),
    "Falcon": config("Falcon", vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4),
    "BLOOM": config("Bloom", **BLOOM),
    "Gemma 4": GEMMA_4,
    "Gemma 3 with images": GEMMA_IMAGES,
    **HYBRIDS,
}


@by_day("Granite", "BLOOM", "LFM2", of=OTHERS)  # of Bamba's kind is Falcon-H1, whose cache is read above
def test_any_other_model_is_compared_with_its_segments_first(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "zfunc")
    model = transformers.AutoModelForCausalLM.from_config(OTHERS[name]())
    assert_own(perturbed(model), rounding=1e-5)
    assert f"the segments of a {type(model).__name__} have its loss and gradients" in caplog.text


def test_a_model_whose_segments_mix_documents_refuses_several_in_a_row() -> None:
    program = compiled(zfunc.hf.segments(transformers.AutoModelForCausalLM.from_config(OTHERS["Falcon"]())))
    batch = zfunc.hf.batch({"input_ids": tokens(), "position_ids": torch.arange(13).expand(4, 13)}, tokens())
    with pytest.raises(ValueError, match="several documents, which the segments of a FalconForCausalLM"):
        zfunc.evaluate(program, zfunc.init(program), batch)


@by_day("LFM2", of=HYBRIDS)
def test_states_of_a_row_are_refused_in_tiles_and_packed_documents(name: str) -> None:
    segments, x = cut(name), tokens(2)[:, :12]
    row = {"input_ids": x, "position_ids": torch.arange(12).expand(2, 12) % 7}
    for tiles, inputs, message in ((2, x, "convolution or linear attention.*tiles=1"), (1, row, "documents")):
        program = compiled(segments, tiles=tiles)
        with pytest.raises(ValueError, match=message):
            zfunc.evaluate(program, zfunc.init(program), zfunc.hf.batch(inputs, x))


def test_states_are_read_from_a_layer_of_the_cache_too() -> None:
    """As models of transformers 5.17 read them."""
    past, (x, state) = PastTokens(KVCache()), torch.randn(2, 1, 4, 5)
    assert not past.has_previous_state()
    assert not PastTokens().has_previous_state(1)
    past.update_conv_state(x, 1, conv_kernel_size=3)
    past.update_recurrent_state(state, 1)
    layer = past.layers[1]
    for known in ((), (1,), (1, 0)):
        assert past.has_previous_state(*known)
    for unknown in ((0,), (1, 1)):
        assert not past.has_previous_state(*unknown)
    assert layer.record_past
    assert torch.equal(layer.conv_states[0], x[..., -3:])
    assert layer.recurrent_states[0] is state
    assert layer.conv_states[1] is None
    with pytest.raises(AttributeError, match="asks its cache for keys"):
        _ = layer.keys
    with inputs_given({"position_ids": x}), pytest.raises(ValueError, match="rows of one document"):
        past.has_previous_state(1)


def test_more_tokens_than_positions_are_refused_before_anything_runs() -> None:
    program = compiled(cut("GPT-2"))
    x = torch.zeros(1, 33, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"'transformer\.wte': got 33 tokens, expected at most the 32"):
        zfunc.train_step(program, zfunc.init(program), (x, x))


def test_without_transformers_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = random_model("Llama")
    monkeypatch.setitem(sys.modules, "transformers", None)
    for call in (lambda: zfunc.hf.segments(model), lambda: zfunc.hf.load(tmp_path)):
        with pytest.raises(ImportError, match=re.escape(MISSING)):
            call()
    monkeypatch.setitem(sys.modules, "transformers", types.SimpleNamespace(__version__="5.11.1"))
    with pytest.raises(ImportError, match=r"got transformers 5\.11\.1, expected version 5\.12 or newer"):
        zfunc.hf.segments(model)
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(zfunc.models, "hf", None)
    for name in [name for name in sys.modules if name.startswith("zfunc.models.hf")]:
        monkeypatch.delitem(sys.modules, name)
    assert callable(importlib.import_module("zfunc.models.hf").batch)


# --- batches: labels weigh as in the model's own loss, whoever collated them -------------------------------


def test_a_collators_dict_is_a_batch_and_its_loss_is_the_models() -> None:
    model = random_model("Llama")
    texts = [torch.randint(1, 50, (6,)).tolist() for _ in range(4)]
    rows = [
        {
            "input_ids": [*text[: 6 - pad], *[0] * pad],
            "attention_mask": [1] * (6 - pad) + [0] * pad,
            "labels": [*text[: 6 - pad], *[-100] * pad],
        }
        for pad, text in enumerate(texts)
    ]
    batch = transformers.default_data_collator(rows)
    program = compiled(zfunc.hf.segments(model), micro_batches=2)
    state = zfunc.init(program)
    expected = float(model(**batch).loss.detach())
    assert zfunc.evaluate(program, state, batch) == pytest.approx(expected, rel=1e-6)
    state, metrics = zfunc.train_step(program, state, transformers.BatchEncoding(batch))
    assert metrics.loss == pytest.approx(expected, rel=1e-6), (
        "the mean over tokens, in parts of unequally many"
    )
    with pytest.raises(ValueError, match="padded at the beginning.*padding_side = 'right'"):
        zfunc.train_step(program, state, {**batch, "attention_mask": batch["attention_mask"].flip(1)})
    with pytest.raises(ValueError, match="got a dict of .*'pixels'.*expected input_ids and labels"):
        zfunc.train_step(program, state, {**batch, "pixels": batch["labels"]})


PADDED = (torch.arange(12) < torch.tensor([[12], [9], [7], [11]])).long()
COLLATED: dict[str, dict[str, Any]] = {
    "padding": {},
    "labels of padding": {"labels": tokens()[:, :12]},
    "types of tokens": {"token_type_ids": tokens(seed=1)[:, :12] % 2},
    "a divisor": {"num_items_in_batch": torch.tensor(50)},
    "positions": {"position_ids": (PADDED.cumsum(1) - 1).masked_fill(PADDED == 0, 1)},
}


@pytest.mark.parametrize(
    "name", ["GPT-2", "Mixtral", *(pytest.param(x, marks=SLOW) for x in ("Qwen3 MoE", "GPT-OSS"))]
)
@pytest.mark.parametrize("more", COLLATED)
def test_all_that_collators_make_has_the_loss_and_gradients_of_the_model(name: str, more: str) -> None:
    """With the loss of routers over the tokens that are no padding."""
    model, ids = random_model(name), tokens()[:, :12]
    batch = {"input_ids": ids, "attention_mask": PADDED, "labels": ids.masked_fill(PADDED == 0, IGNORED)}
    batch |= COLLATED[more]
    segments = zfunc.hf.segments(model)
    own = model(**{k: x for k, x in batch.items() if name == "GPT-2" or k != "token_type_ids"}).loss
    assert_plain(segments, model, *segments[-1].read_dict(batch), own)


@pytest.mark.parametrize("name", ["Llama", "Mixtral", "SmolLM3", "Cohere2", "Olmo3"])
def test_documents_of_a_flattening_collator_do_not_attend_to_each_other(name: str) -> None:
    model = model_of(MIXED[name](4)) if name in MIXED else random_model(name)
    rows = [{"input_ids": tokens(1, n)[0, : 4 + 2 * n].tolist()} for n in range(4)]
    batch = transformers.DataCollatorWithFlattening()(rows)
    segments = zfunc.hf.segments(model)
    own = model(**batch, use_cache=False).loss  # with a cache it does not look for documents
    assert_plain(segments, model, *segments[-1].read_dict(batch), own)
    with pytest.raises(ValueError, match="position_ids that do not count from 0 in each document"):
        segments[-1].read_dict({**batch, "position_ids": batch["position_ids"] + 1})


@pytest.mark.parametrize("micro_batches", [4, *(pytest.param(n, marks=SLOW) for n in (1, 2, 8))])
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
    program = compiled(cut("Llama"))
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


def test_experts_of_transformers_before_5_23_say_nothing_of_a_norm() -> None:
    g = torch.Generator().manual_seed(0)
    x, up, down = (torch.randn(*n, generator=g) for n in ((3, 4), (2, 6, 4), (2, 4, 6)))
    own = {
        "has_gate": False,
        "has_bias": False,
        "is_transposed": False,
        "num_experts": 2,
        "act_fn": torch.relu,
    }
    chosen, weights = torch.tensor([[0], [1], [1]]), torch.tensor([[0.5], [1.0], [2.0]])
    got = run_all_experts(types.SimpleNamespace(**own, up_proj=up, down_proj=down), x, chosen, weights)
    each = [
        w * down[e] @ torch.relu(up[e] @ t) for t, e, w in zip(x, chosen[:, 0], weights[:, 0], strict=True)
    ]
    torch.testing.assert_close(got, torch.stack(each))
