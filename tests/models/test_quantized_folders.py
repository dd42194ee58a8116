"""Folders of models in 4 and 8 bits: read as bitsandbytes writes them, made of 16 bits, merged, refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import GEMMA_IMAGES, SIZE, VOCAB, transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import zfunc
from zfunc.errors import CheckpointError
from zfunc.models.quantization import FORMATS, NF4, decode, dynamic_map

peft = pytest.importorskip("peft")
LORA: dict[str, Any] = {"lora": peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")}
TOKENS = torch.randint(3, VOCAB, (4, 17), generator=torch.Generator().manual_seed(0))
BATCH = TOKENS[:, :-1], TOKENS[:, 1:]
SAID = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16"}
NESTED = {"nested_blocksize": 256, "nested_dtype": "float32"}
CONFIGS = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "nf4-single": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "int8": {"load_in_8bit": True},
}


@pytest.fixture(autouse=True, scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small Llama in bf16."""
    folder = tmp_path_factory.mktemp("models") / "m"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZE | {"hidden_size": 64, "intermediate_size": 96})
    transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def parts_of(name: str, w: Tensor, kind: str) -> dict[str, Tensor]:
    """The tensors that `save_pretrained` writes of a weight, of the bytes that zfunc makes."""
    stored = FORMATS[kind].encode(w)
    if kind == "int8":
        edge, module = 4 * len(w), name.removesuffix("weight")
        own = {
            name: stored[edge:].view(torch.int8).view(w.shape),
            f"{module}SCB": stored[:edge].view(torch.float32),
        }
        return own | {f"{module}weight_format": torch.tensor(0, dtype=torch.uint8)}
    blocks, said = -(-w.numel() // 64), SAID | {"shape": [*w.shape]}
    own = {"quant_map": torch.tensor(NF4)}
    if kind == "nf4":
        count = -(-blocks // 256)
        outer, begin = stored[: 4 * count + 4].view(torch.float32), 4 * count + 4
        said |= NESTED | {"nested_offset": outer[-1].item()}
        own |= {"absmax": stored[begin : begin + blocks], "nested_absmax": outer[:-1]}
        own |= {"nested_quant_map": torch.tensor(dynamic_map())}
        begin += blocks
    else:
        own["absmax"], begin = stored[: 4 * blocks].view(torch.float32), 4 * blocks
    own["quant_state.bitsandbytes__nf4"] = torch.tensor([*json.dumps(said).encode()], dtype=torch.uint8)
    return {name: stored[begin:].view(-1, 1)} | {f"{name}.{x}": t.contiguous() for x, t in own.items()}


def written(
    model: Path,
    out: Path,
    kind: str,
    change: Callable[[dict[str, Tensor]], Any] = lambda _: None,
    *,
    config_said: bool = True,
    **said: Any,
) -> Path:
    """A folder as bitsandbytes writes it, and changed; without `config_said` its config does not say so."""
    shutil.copytree(model, out)
    config = json.loads((out / "config.json").read_text())
    if config_said:
        config["quantization_config"] = {"quant_method": "bitsandbytes"} | CONFIGS[kind] | said
    (out / "config.json").write_text(json.dumps(config))
    tensors: dict[str, Tensor] = {}
    for name, t in load_file(model / "model.safetensors").items():
        tensors |= parts_of(name, t, kind) if "_proj.weight" in name else {name: t}
    change(tensors)
    save_file({x: t.contiguous() for x, t in tensors.items()}, out / "model.safetensors", {"format": "pt"})
    return out


def trained(folder: Path, **given: Any) -> tuple[Any, Any, list[float]]:
    _, segments = zfunc.hf.load(folder, **LORA, **given)
    program = zfunc.compile(segments, precision="bf16", optimizer=zfunc.AdamW(lr=1e-2), params_on="host")
    state, losses = zfunc.init(program), list[float]()
    for _ in range(3):
        state, metrics = zfunc.train_step(program, state, BATCH)
        losses.append(metrics.loss)
    return program, state, losses


@pytest.mark.parametrize(
    "kind", ["nf4", *(pytest.param(x, marks=pytest.mark.slow) for x in ("nf4-single", "int8"))]
)
def test_a_quantized_folder_trains_as_one_that_is_quantized_while_it_is_read(
    kind: str, model: Path, tmp_path: Path
) -> None:
    read, made = trained(written(model, tmp_path / "q", kind)), trained(model, quantize=kind)
    assert read[2] == made[2]
    values, others = (zfunc.params(*x[:2]) for x in (read, made))
    assert values.keys() == others.keys()
    assert all(torch.equal(t, others[x]) for x, t in values.items())
    assert {x.rpartition(".")[2] for x in values if "_proj.base_layer" in x} == {kind}
    assert "base_model.model.lm_head.weight" in values


def test_a_folder_that_bitsandbytes_writes_is_read(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("accelerate")
    for kind, given in CONFIGS.items():
        how = transformers.BitsAndBytesConfig(**given)
        auto = transformers.AutoModelForCausalLM
        auto.from_pretrained(model, quantization_config=how, dtype=torch.bfloat16).save_pretrained(
            tmp_path / kind
        )
        _, segments = zfunc.hf.load(tmp_path / kind, **LORA)
        stored, plain = segments[1].initial(0), load_file(model / "model.safetensors")
        for name, t in stored.items():
            if name.endswith(kind):
                own = plain[
                    name.removeprefix("base_model.model.").replace("base_layer.", "").removesuffix(f".{kind}")
                ]
                mine = decode(FORMATS[kind].encode(own), kind, tuple(own.shape))
                # Codes of scales from its CPU library may be the second nearest.
                torch.testing.assert_close(decode(t, kind, tuple(own.shape)), mine, rtol=0.02, atol=1e-4)


def test_adapters_are_merged_with_the_decoded_weights(model: Path, tmp_path: Path) -> None:
    folder = written(model, tmp_path / "q", "nf4")
    program, state, _ = trained(folder)
    zfunc.hf.save(tmp_path / "merged", program, state, config=folder, **LORA)
    zfunc.hf.save(tmp_path / "adapter", program, state, config=folder, **LORA, adapter_only=True)
    path = zfunc.save(tmp_path / "kept", program, state)
    zfunc.hf.export(path, tmp_path / "exported", config=model, **LORA)
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())
    merged, exported = (load_file(tmp_path / x / "model.safetensors") for x in ("merged", "exported"))
    name, values = "model.layers.0.self_attn.q_proj", zfunc.weights(program, state, dtype="fp32")
    own = {x: t.clone() for x, t in values if name in x}
    a, b, stored = (
        own[f"base_model.model.{name}.{x}.weight{end}"]
        for x, end in (("lora_A.default", ""), ("lora_B.default", ""), ("base_layer", ".nf4"))
    )
    plain = decode(stored.to(torch.uint8), "nf4", (64, 64))
    scale = LORA["lora"].lora_alpha / 4
    torch.testing.assert_close(merged[f"{name}.weight"], plain + scale * b @ a)
    assert merged.keys() == exported.keys()
    assert all(torch.equal(t, exported[x]) for x, t in merged.items())
    assert len(load_file(tmp_path / "adapter" / "adapter_model.safetensors")) == 2 * 7 * 3


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft calls it
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_magnitudes_of_dora_are_of_the_decoded_weights(kind: str, model: Path, tmp_path: Path) -> None:
    lora = peft.LoraConfig(r=4, use_dora=True, task_type="CAUSAL_LM")
    decoded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for name, p in decoded.named_parameters():
        if "_proj.weight" in name:
            p.data = decode(FORMATS[kind].encode(p), kind, tuple(p.shape))
    own = dict(peft.get_peft_model(decoded, lora).named_parameters())
    for folder, given in ((model, {"quantize": kind}), (written(model, tmp_path / "q", kind), {})):
        _, segments = zfunc.hf.load(folder, lora=lora, **given)
        drawn = {x: t for s in segments for x, t in s.initial(0).items() if "magnitude" in x}
        assert len(drawn) == 2 * 3
        for x, t in drawn.items():
            torch.testing.assert_close(t, own[x].detach(), rtol=1e-6, atol=0)


def dropped(end: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.pop(next(x for x in tensors if x.endswith(end)))


def other_map(tensors: dict[str, Tensor]) -> None:
    tensors[next(x for x in tensors if x.endswith(".quant_map"))][3] += 1


def short(tensors: dict[str, Tensor]) -> None:
    name = next(x for x in tensors if x.endswith("q_proj.weight"))
    tensors[name] = tensors[name][:-1]


Bad = tuple[str, dict[str, Any], dict[str, Any]]
REFUSED: dict[str, Bad] = {
    "without `lora`, expected adapters": ("nf4", {}, {"lora": None}),
    r"got 'int8' for .*which has its weights in nf4: leave it out": ("nf4", {}, {"quantize": "int8"}),
    "quantized by gptq, expected bitsandbytes' NF4.*in 16 bits, with quantize": (
        "nf4",
        {"quant_method": "gptq"},
        {},
    ),
    "quantized by bitsandbytes in fp4": ("nf4", {"bnb_4bit_quant_type": "fp4"}, {}),
    r"got no '.*_proj\.weight\.absmax'": ("nf4", {"change": dropped(".absmax")}, {}),
    r"got '.*' without a quant_state": ("nf4", {"change": dropped("bitsandbytes__nf4")}, {}),
    r"quant_map' of other values": ("nf4", {"change": other_map}, {}),
    r"bytes of '.*q_proj\.weight', expected": ("nf4-single", {"change": short}, {}),
    "in nf4, of which config.json says nothing": ("nf4", {"config_said": False}, {}),
    "in int8, of which config.json says nothing": ("int8", {"config_said": False}, {"quantize": "nf4"}),
    "leave it out of modules_to_save": (
        "nf4",
        {},
        {"lora": peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["up_proj"])},
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message: str, model: Path, tmp_path: Path) -> None:
    kind, how, given = REFUSED[message]
    folder = written(model, tmp_path / "q", kind, **how)
    with pytest.raises((ValueError, CheckpointError), match=message):
        _, segments = zfunc.hf.load(folder, **LORA | given)
        segments[1].initial(0)


def test_a_model_without_linear_layers_and_an_unknown_format_are_refused(model: Path) -> None:
    with pytest.raises(ValueError, match="quantize: got 'nf8', expected one of nf4, nf4-single, int8"):
        zfunc.hf.load(model, **LORA, quantize="nf8")
    config = transformers.GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=2, n_positions=8)
    with pytest.raises(ValueError, match="which has no linear layers"):
        zfunc.hf.describe(config, lora=peft.LoraConfig(r=2), quantize="nf4")


def test_a_plan_of_a_quantized_config_is_of_its_format(model: Path, tmp_path: Path) -> None:
    for kind in ("nf4", "int8"):
        _, segments = zfunc.hf.describe(written(model, tmp_path / kind, kind), **LORA)
        assert sum(p.name.endswith(f".{kind}") for p in segments[1].parameters) == 7
    skipped = ["lm_head", "down_proj", "model.layers.0.self_attn"]
    folder = written(model, tmp_path / "skipped", "nf4", llm_int8_skip_modules=skipped)
    _, segments = zfunc.hf.describe(folder, **LORA)
    assert [sum(p.name.endswith(".nf4") for p in s.parameters) for s in segments[1:3]] == [2, 6]
    whole = GEMMA_IMAGES()
    whole.quantization_config = {"quant_method": "bitsandbytes"} | CONFIGS["int8"]
    _, segments = zfunc.hf.describe(whole, text_only=True, **LORA)
    assert any(p.name.endswith(".int8") for p in segments[1].parameters)
