"""Folders of transformers: weights from one and back, to the bit, and what a wrong one is told."""

import inspect
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hf_models import (
    CONFIGS,
    DEEPSEEK,
    ERNIE,
    GEMMA_IMAGES,
    T5,
    assert_plain,
    compiled,
    config,
    perturbed,
    random_model,
    tokens,
    transformers,
    unequal,
)
from torch import Tensor

import zfunc
from zfunc.cli.main import main
from zfunc.engine.program.program import Program
from zfunc.errors import CheckpointError
from zfunc.train.pretrained import PretrainedModel


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


def tensors(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Callable[[Path], object]:
    return lambda folder: rewrite(folder, change)


def a_shard(change: Callable[[Path], object]) -> Callable[[Path], object]:
    """The same model in shards, one of them changed."""

    def apply(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        write(random_model("Llama"), folder, max_shard_size="20KB")
        change(max(folder.glob("model-*.safetensors")))

    return apply


FLAWS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (
        tensors(lambda t: {k: v for k, v in t.items() if k != "model.norm.weight"}),
        r"got no 'model\.norm\.weight' \(did you mean",
    ),
    "renamed": (
        tensors(lambda t: {k.replace("model.norm.w", "model.nrom.w"): v for k, v in t.items()}),
        r"got 'model\.nrom\.weight' \(did you mean 'model\.norm\.weight'\?\), which the model does not have",
    ),
    "extra": (
        tensors(lambda t: {**t, "score.weight": torch.ones(2)}),
        "got 'score.weight'.*which the model does not",
    ),
    "shape": (
        tensors(lambda t: {**t, "lm_head.weight": torch.ones(3, 32)}),
        r"'lm_head\.weight' of shape \(3, 32\), expected \(61, 32\)",
    ),
    "type": (
        tensors(lambda t: {k: v.to(torch.int8) for k, v in t.items()}),
        "in I8, expected F64, F32, BF16, F16",
    ),
    "no config": (lambda folder: (folder / "config.json").unlink(), r"no config\.json"),
    "no weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        r"neither model\.safetensors nor",
    ),
    "pickled weights": (
        lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
        r"neither model\.safetensors nor .*: let transformers read pytorch_model.bin, and save_pretrained",
    ),
    "a lost shard": (
        a_shard(Path.unlink),
        r"got no model-0000\d-of-0000\d\.safetensors, one of \d shards that .*index\.json names, .*: copy or",
    ),
    "an index that is torn": (
        a_shard(lambda x: (x.parent / "model.safetensors.index.json").write_text('{"weight_map": 1')),
        r"index\.json: got an index that cannot be read \(JSONDecodeError: .*: copy it again",
    ),
    "an index of nothing": (
        a_shard(lambda x: (x.parent / "model.safetensors.index.json").write_text('{"weight_map": {}}')),
        r"index\.json: got an index that cannot be read \(LookupError: an empty weight_map\), .*: copy it again",
    ),
    "a pointer of git lfs": (
        lambda folder: (folder / "model.safetensors").write_text(
            "version https://git-lfs.github.com/spec/v1\n"
        ),
        "model.safetensors: got a pointer of git lfs: fetch the weights, by git lfs pull",
    ),
    "an adapter on top": (
        lambda folder: (folder / "adapter_config.json").write_text("{}"),
        "got adapter_config.json, of an adapter that transformers would put .*, expected a model alone: save the",
    ),
    "an adapter alone": (
        lambda folder: (folder / "config.json").rename(folder / "adapter_config.json"),
        "got no config.json in it, .*: it has an adapter alone: name the folder of the model that it adapts",
    ),
    "a short shard": (a_shard(lambda x: x.write_bytes(x.read_bytes()[:-8])), "cannot be read"),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_folder_of_another_model_is_refused_by_name_before_anything_is_read(
    flaw: str, tmp_path: Path
) -> None:
    folder = write(random_model("Llama"), tmp_path / "m")
    FLAWS[flaw][0](folder)
    with pytest.raises(CheckpointError, match=FLAWS[flaw][1]):
        zfunc.hf.load(folder)


@pytest.mark.parametrize(
    ("lost", "message"), [("1.w1", "Sizes of tensors must match"), ("3.w", r"shape \(3, 96, 32\)")]
)
def test_experts_that_are_not_all_there_are_refused(lost: str, message: str, tmp_path: Path) -> None:
    folder = write(random_model("Mixtral"), tmp_path / "m")
    rewrite(
        folder, lambda t: {k: v for k, v in t.items() if f"layers.0.block_sparse_moe.experts.{lost}" not in k}
    )
    with pytest.raises(CheckpointError, match=f"experts.*({message})"):
        zfunc.hf.load(folder)


def test_of_shards_of_two_saves_those_of_the_index_are_read(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = random_model("Llama")
    folder = write(model, tmp_path / "m", max_shard_size="20KB")
    older = {x: t + 1 for x, t in model.state_dict().items()}
    save_file(older, folder / "model-00001-of-00001.safetensors", metadata={"format": "pt"})
    values = {x: t for s in zfunc.hf.load(folder)[1] for x, t in s.initial(0).items()}
    assert all(torch.equal(values[x], p) for x, p in model.named_parameters())


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


def test_a_folder_of_another_kind_is_not_supported_rather_than_damaged(tmp_path: Path) -> None:
    transformers.T5Model(config("T5", **T5)()).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError,
        match="^model: got a T5Model, which is an encoder-decoder, with two inputs, expected a causal language",
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
        ("runs/of/last/week", "there is no such folder: check"),
        ("/nowhere", "there is no such folder: check"),
        ("../model", "there is no such folder: check"),
    ],
)
def test_a_name_on_the_hub_gets_the_command_that_downloads_it(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=f"^{name}: got no config.json in it.*{message}"):
        zfunc.hf.load(name)


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
    handed, there = dict(zfunc.hf.weights(program, state, config=folder)), saved.state_dict()
    assert all(torch.equal(there.pop(name), t) for name, t in handed.items())
    assert not there
    with pytest.raises(ValueError, match="^config: got one of a model that saves .*expected its folder"):
        zfunc.hf.save(tmp_path / "other", program, state, config=model.config)


# What `from_pretrained` reads of a class. Tests have the effects of the first; missing keys are refused.
OF_WEIGHTS = {"_keep_in_fp32_modules", "_keep_in_fp32_modules_strict", "_keys_to_ignore_on_load_unexpected"}
OF_WEIGHTS |= {"_keys_to_ignore_on_load_missing", "_tied_weights_keys", "base_model_prefix", "config_class"}
OF_PLACES = {
    "_auto_class",
    "_hf_peft_config_loaded",
    "_prepare_peft_hotswap_kwargs",
    "_is_distributed_loading_by_transformers",
}
OF_PLACES |= {"_device_mesh", "_mesh_manager", "_fsdp_size", "_tp_plan", "_tp_size", "_pp_plan"}
OF_PLACES |= {"_supports_attention_backend"}


def test_what_a_class_says_of_its_weights_is_known() -> None:
    """A declaration that a new version of transformers honours is one that zfunc has to know."""
    from transformers import core_model_loading, modeling_utils

    source = inspect.getsource(modeling_utils.PreTrainedModel) + inspect.getsource(core_model_loading)
    loading = source[source.index("def _get_dtype_plan") :]
    declared = {
        name
        for owner in modeling_utils.PreTrainedModel.__mro__
        if owner.__module__.startswith("transformers.")
        for name, value in vars(owner).items()
        if not name.startswith("__") and not (callable(value) or hasattr(value, "__get__"))
    }
    read = {x for x in declared if re.search(rf"\b{x}\b", loading)}
    assert {"_keep_in_fp32_modules_strict", "_keys_to_ignore_on_load_unexpected"} <= read
    assert read - OF_WEIGHTS - OF_PLACES == set()


@pytest.mark.parametrize(
    ("name", "precision"),
    [("ERNIE 4.5", "bf16"), ("GPT-OSS", "fp16"), pytest.param("ERNIE 4.5", "fp16", marks=pytest.mark.slow)],
)
def test_modules_that_a_class_keeps_in_fp32_are_so_on_the_device_and_in_folders(
    name: str, precision: Any, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    made = perturbed(transformers.AutoModelForCausalLM.from_config({**CONFIGS, "ERNIE 4.5": ERNIE}[name]()))
    folder, dtype = (
        write(made, tmp_path / "m"),
        getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[precision]),
    )
    own = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    kept = {full for full, p in own.named_parameters() if p.dtype == torch.float32}
    program = compiled(zfunc.hf.load(folder)[1], precision=precision)
    assert kept == {x.name for b in program.layout.all_buckets if b.in_fp32 for x in b.spans}
    assert kept
    x, state = tokens(), zfunc.init(program)
    state, metrics = zfunc.train_step(program, state, (x[:, :-1], x[:, 1:]))
    assert metrics.loss == pytest.approx(float(own(x, labels=x).loss.detach()), rel=2e-3)
    out = zfunc.hf.save(tmp_path / "saved", program, state, config=folder, dtype=precision)
    saved = transformers.AutoModelForCausalLM.from_pretrained(out)
    exact = zfunc.params(program, state)
    assert {full for full, p in saved.named_parameters() if torch.equal(p, exact[full])} >= kept
    assert {full for full, p in saved.named_parameters() if p.dtype == torch.float32} == kept


def test_tensors_that_a_class_leaves_aside_are_left_aside(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(ERNIE())
    folder = write(model, tmp_path / "m")
    rewrite(folder, lambda t: {**t, "model.mtp_block.0.weight": torch.ones(3)})
    assert not transformers.AutoModelForCausalLM.from_pretrained(folder).training  # it takes the folder
    program = compiled(zfunc.hf.load(folder)[1])
    logits = zfunc.apply(program, zfunc.init(program), tokens())
    assert torch.allclose(logits, model.eval()(tokens()).logits, atol=1e-5)


def test_a_model_of_images_and_text_trains_on_text(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = perturbed(transformers.AutoModelForCausalLM.from_config(GEMMA_IMAGES()))
    folder = write(model, tmp_path / "m")
    program, state = trained(folder)
    assert PretrainedModel(folder, model.config, ()).sizes["num_layers"] == len(program.segments) - 2
    out = zfunc.hf.save(tmp_path / "saved", program, state, config=folder)
    saved = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert torch.allclose(saved(tokens()).logits, zfunc.apply(program, state, tokens()), atol=1e-5)
    changed = {x for x, p in saved.named_parameters() if not torch.equal(p, model.get_parameter(x))}
    assert changed == {x for x, _ in model.named_parameters() if "language_model" in x}


LANGUAGE = (
    "model.language_model.",
    "model.",
)  # how the names of a whole model begin, and of its language model


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_of_a_model_of_images_and_text_the_language_model_alone_is_trained(
    tied: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = perturbed(transformers.AutoModelForCausalLM.from_config(GEMMA_IMAGES(tie_word_embeddings=tied)))
    folder, x = write(model, tmp_path / "m"), tokens()
    config, cut = zfunc.hf.load(folder, text_only=True)
    program = compiled(cut)
    state = zfunc.init(program)
    own = {
        k.replace(*LANGUAGE): p for k, p in model.named_parameters() if "vision" not in k and "modal" not in k
    }
    values = zfunc.params(program, state)
    assert values.keys() == own.keys()
    assert all(torch.equal(values[name], p) for name, p in own.items())
    whole = SimpleNamespace(named_parameters=own.items)
    assert_plain(cut, whole, x[:, :-1], x[:, 1:], model(x, labels=x).loss)
    state, _ = zfunc.train_step(program, state, (x[:, :-1], x[:, 1:]))
    for place in (folder, config):
        out = zfunc.hf.save(tmp_path / type(place).__name__, program, state, config=place)
        saved, report = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
        assert type(saved).__name__ == "Gemma3ForCausalLM"
        assert not any(report.values())
        assert torch.allclose(saved(x).logits, zfunc.apply(program, state, x), atol=1e-5)


@pytest.mark.usefixtures("without_advice")
@pytest.mark.usefixtures("without_advice")
@pytest.mark.usefixtures("without_advice")
def test_the_command_takes_the_language_model_alone_and_its_config_without_weights(tmp_path: Path) -> None:
    GEMMA_IMAGES().save_pretrained(tmp_path)
    config, cut = zfunc.hf.describe(tmp_path, text_only=True)
    program = compiled(cut)
    assert zfunc.init(program).step == 0
    assert config.model_type == "gemma3_text"
    np.zeros(400, np.uint16).tofile(tmp_path / "t.bin")
    given = ["--text-only", "--seq-length", "8", "--batch-size", "2"]
    data = ["--data", str(tmp_path / "t.bin"), "--out", str(tmp_path / "run"), "--steps", "1", "--no-sample"]
    assert main(["plan", "--hf-config", str(tmp_path / "config.json"), *given]) == 0
    transformers.AutoModelForCausalLM.from_config(GEMMA_IMAGES()).save_pretrained(tmp_path)
    assert main(["train", "--hf", str(tmp_path), *given, *data]) == 0
    assert main(["export", str(tmp_path / "run"), "--hf", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(saved).__name__ == "Gemma3ForCausalLM"
    with pytest.raises(
        ValueError, match="text_only: got it for a llama, which is of text alone, .*: leave it out"
    ):
        zfunc.hf.describe(CONFIGS["Llama"](), text_only=True)


def test_a_folder_in_bf16_says_so_and_moments_do_not_matter(tmp_path: Path) -> None:
    folder = write(random_model("Llama tied"), tmp_path / "m")
    program, state = trained(folder, optimizer=zfunc.AdamW(moments="8bit"))
    out = zfunc.hf.save(tmp_path / "saved", program, state, config=zfunc.hf.load(folder)[0], dtype="bf16")
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    weights = zfunc.params(program, state)
    assert model.dtype == torch.bfloat16
    assert all(torch.equal(weights[full].bfloat16(), p) for full, p in model.named_parameters())
    handed = dict(zfunc.hf.weights(program, state, config=folder, dtype="bf16"))
    assert "lm_head.weight" not in handed, "a tied one comes once"
    assert all(torch.equal(handed.pop(full), p) for full, p in model.named_parameters())
    assert not handed


def test_a_folder_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    folder = write(random_model("Llama"), tmp_path / "m")
    other = write(random_model("Llama tied"), tmp_path / "other")
    program, state = trained(folder)
    checkpoint = zfunc.save(tmp_path / "run", program, state)
    new = tmp_path / "x"
    calls: dict[str, Callable[[], Any]] = {
        "which exists, expected a new folder": lambda: zfunc.hf.save(folder, program, state, config=folder),
        "has no 'lm_head.weight'.*, expected it of shape .*: pass the config that the segments": lambda: (
            zfunc.hf.save(new, program, state, config=other)
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
    with pytest.raises(ValueError, match="pass the config that the segments"):
        zfunc.hf.weights(program, state, config=other)
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
    assert "got no --out, expected one: name it after the command" in capsys.readouterr().err


FLAWED: dict[str, list[Any]] = {
    **{name: [-1, 0, 10**9, 10**30] for name in ("hidden_size", "num_hidden_layers", "vocab_size")},
    **{name: [-4, 0, "x", 1.5] for name in ("num_attention_heads", "intermediate_size")},
    **{name: [-1, 0, 10**12, {}] for name in ("head_dim", "max_position_embeddings")},
    **{"hidden_act": ["none"], "rms_norm_eps": ["x"], "architectures": [3]},
    "rope_parameters": [[1], json.loads("[" * 500 + "]" * 500)],
}


def test_a_config_that_no_model_has_is_an_error_of_its_folder_at_once(tmp_path: Path) -> None:
    random_model("Llama").save_pretrained(tmp_path)
    began = time.process_time()
    file = tmp_path / "config.json"
    whole = json.loads(file.read_text())
    flawed = [json.dumps({**whole, name: value}) for name, values in FLAWED.items() for value in values]
    for text in (*flawed, "[" * 10**5):
        file.write_text(text)
        for read in (zfunc.hf.describe, zfunc.hf.load):
            with pytest.raises(ValueError, match=f"^{tmp_path}: got "):
                read(str(tmp_path))
    assert time.process_time() - began < 60
