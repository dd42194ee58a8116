"""A training of torchtitan goes on as transformers' model: the same logits, the same next losses, and its moments.

`Titan` is written after torchtitan's source, in plain PyTorch: its names, and its rotary positions, which turn
neighbours as complex numbers in a Llama and halves of a head in Qwen3.
"""

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import torch.distributed.checkpoint as dcp
from foreign_files import MOMENTS, RATE, torch_step
from pairs import in_pairs
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import zfunc
from zfunc.checkpoint.directory import open_checkpoint
from zfunc.checkpoint.import_run import import_run
from zfunc.checkpoint.reader import CheckpointReader, WantedSlice
from zfunc.cli.main import main
from zfunc.errors import CheckpointError

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

VOCAB, DIM, HEADS, KV_HEADS, HIDDEN = 61, 32, 4, 2, 48
HEAD_DIM = {"Llama": 8, "Qwen3": 12}
F = nn.functional


class Attention(nn.Module):
    def __init__(self, kind: str, newer: bool) -> None:
        super().__init__()
        size = self.size = HEAD_DIM[kind]
        rows = {"wq": HEADS * size, "wk": KV_HEADS * size, "wv": KV_HEADS * size}
        qkv = {x: nn.Linear(DIM, n, bias=False) for x, n in rows.items()}
        for x, linear in qkv.items() if not newer else {"qkv_linear": nn.ModuleDict(qkv)}.items():
            setattr(self, x, linear)
        self.wo = nn.Linear(HEADS * size, DIM, bias=False)
        if kind == "Qwen3":
            self.q_norm, self.k_norm = (nn.RMSNorm(size, eps=1e-6) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            self.get_submodule(f"qkv_linear.{w}" if hasattr(self, "qkv_linear") else w)(x)
            .unflatten(-1, (-1, self.size))
            .transpose(1, 2)
            for w in ("wq", "wk", "wv")
        )
        if hasattr(self, "q_norm"):
            q, k = halves(self.q_norm(q)), halves(self.k_norm(k))
        else:
            q, k = neighbours(q), neighbours(k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).flatten(2))


def angles(x: Tensor) -> Tensor:
    size = x.shape[-1]
    return torch.outer(torch.arange(x.shape[-2]), 1e4 ** -(torch.arange(0, size, 2) / size))


def neighbours(x: Tensor) -> Tensor:
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.exp(1j * angles(x))
    return torch.view_as_real(turned).flatten(-2)


def halves(x: Tensor) -> Tensor:
    a = angles(x)
    first, second = x.chunk(2, -1)
    return torch.cat([first * a.cos() - second * a.sin(), second * a.cos() + first * a.sin()], -1)


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(DIM, HIDDEN, bias=False) for _ in range(2))
        self.w2 = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, kind: str, newer: bool) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(kind, newer), FeedForward()
        self.attention_norm, self.ffn_norm = (nn.RMSNorm(DIM, eps=1e-6) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Titan(nn.Module):
    """A model of torchtitan; `newer` has the names of 0.3, else those of 0.1 and 0.2."""

    def __init__(self, kind: str, newer: bool = True) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleDict({str(n): Block(kind, newer) for n in range(2)})
        self.norm = nn.RMSNorm(DIM, eps=1e-6)
        self.last = "lm_head" if newer else "output"
        setattr(self, self.last, nn.Linear(DIM, VOCAB, bias=False))

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.tok_embeddings(ids)
        for layer in self.layers.values():
            x = layer(x)
        logits = self.get_submodule(self.last)(self.norm(x))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch(n: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, VOCAB, (2, 11), generator=torch.Generator().manual_seed(n))
    return ids[:, :-1], ids[:, 1:]


def trained(kind: str, newer: bool = True) -> tuple[Titan, torch.optim.AdamW]:
    torch.manual_seed(0)
    model = Titan(kind, newer)
    optimizer = torch.optim.AdamW(model.parameters(), **RATE)
    for n in range(3):
        torch_step(model, optimizer, batch(n))
    return model, optimizer


def save(folder: Path, model: Titan, optimizer: Any, *, fused: bool = False) -> None:
    """What torchtitan's CheckpointManager writes; `fused` with its moments of queries, keys and values in one."""
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, moments = get_state_dict(model, optimizer, options=flat)
    for name in [x for x in moments if fused and ".wq." in x]:
        apart = [moments.pop(name.replace(".wq.", f".w{x}.")) for x in "qkv"]
        if not name.endswith((".step", *MOMENTS)):
            continue
        one = apart[0] if name.endswith(".step") else torch.cat([x.view(KV_HEADS, -1, DIM) for x in apart], 1)
        moments[name.replace(".wq.", ".wqkv.")] = one.view(-1, DIM) if one.ndim else one
    state = {**weights, "optimizer": moments, "train_state": {"step": torch.tensor(3)}}
    dcp.save(state, checkpoint_id=folder, no_dist=True)


def theirs(kind: str) -> Any:
    """transformers' config of a `Titan`."""
    size = {
        "hidden_size": DIM,
        "intermediate_size": HIDDEN,
        "num_attention_heads": HEADS,
        "vocab_size": VOCAB,
    }
    more = {"num_key_value_heads": KV_HEADS, "num_hidden_layers": 2, "max_position_embeddings": 32}
    given = {"head_dim": HEAD_DIM[kind], "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
    return getattr(transformers, f"{kind}Config")(**size, **more, **given)


@pytest.mark.parametrize(("form", "kind"), in_pairs(["older", "newer", "newer, fused"], HEAD_DIM, meet=1))
def test_a_model_of_torchtitan_goes_on_as_that_of_transformers(kind: str, form: str, tmp_path: Path) -> None:
    model, optimizer = trained(kind, form != "older")
    save(tmp_path / "theirs", model, optimizer, fused="fused" in form)
    config, own = zfunc.hf.describe(theirs(kind))
    taken = import_run(tmp_path / "theirs", tmp_path / "taken", segments=own)
    program = zfunc.compile(own, precision="fp32", device="cpu", optimizer=zfunc.AdamW(**RATE))
    state = zfunc.load(taken.path.parent, program)
    assert (taken.step, state.step) == (3, 3)

    again = transformers.AutoModelForCausalLM.from_config(config)
    again.load_state_dict({x: t.view(again.state_dict()[x].shape) for x, t in zfunc.weights(program, state)})
    with torch.no_grad():
        torch.testing.assert_close(again(batch(3)[0]).logits, model(batch(3)[0]), rtol=1e-5, atol=1e-6)

    for n in (3, 4):  # the second has what the first made of the moments
        state, metrics = zfunc.train_step(program, state, batch(n))
        assert metrics.loss == pytest.approx(torch_step(model, optimizer, batch(n)), rel=2e-6)


def test_the_size_of_a_head_is_that_of_the_model_and_another_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "theirs", *trained("Llama"))
    transformers.LlamaForCausalLM(theirs("Llama")).save_pretrained(tmp_path / "model")
    command = ["import", str(tmp_path / "theirs"), "--hf", str(tmp_path / "model"), "--out"]
    assert main([*command, str(tmp_path / "taken"), "--head-dim", "16"]) == 2
    assert "--head-dim: got 16, expected 8, as the model has it: leave it out" in capsys.readouterr().err
    assert main([*command, str(tmp_path / "taken")]) == 0
    assert "torchtitan's names of a llama3" in capsys.readouterr().out
    own = zfunc.hf.describe(theirs("Llama"))[1]
    for wrong in (4, 16):  # which divide all rows
        with pytest.raises(
            ValueError, match=f"head_dim: got {wrong}, expected 8, as the model has it: leave"
        ):
            import_run(tmp_path / "theirs", tmp_path / "other", segments=own, head_dim=wrong)
    silent = [attrs.evolve(x, module=None) for x in own]
    for wrong in (None, 1, 5):
        with pytest.raises(
            CheckpointError, match=r"for 'layers.0.*wq.weight', .* divides 32 rows: pass `head_dim`"
        ):
            import_run(tmp_path / "theirs", tmp_path / "other", segments=silent, head_dim=wrong)


def test_moments_of_torchtitans_fused_queries_keys_and_values_are_divided_as_its_weights(
    tmp_path: Path,
) -> None:
    """Of 2 groups of 3 heads of queries, one of keys, one of values, each head with 4 rows. As torchtitan 0.3.0 has
    it, weights are saved apart, the parameter is one."""
    heads, head_dim, names = 3, 4, ("wq", "wk", "wv")
    fused = {kind: torch.arange(2 * 5 * head_dim * 2.0).view(-1, 2) + n for n, kind in enumerate(MOMENTS)}
    of_row = [(0, 0, 0, 1, 2)[row // head_dim % (heads + 2)] for row in range(2 * 5 * head_dim)]
    weights = {f"a.{x}.weight": torch.randn(of_row.count(n), 2) for n, x in enumerate(names)}
    state = {f"optimizer.state.a.wqkv.weight.{kind}": t for kind, t in fused.items()}
    state |= {"optimizer.state.a.wqkv.weight.step": torch.tensor(3.0), "train_state.step": torch.tensor(3)}
    dcp.save({**weights, **state}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    for wrong in (None, 5):
        with pytest.raises(CheckpointError, match=r"for 'a.wqkv.weight', .* divides 8 rows: pass `head_dim`"):
            import_run(tmp_path / "theirs", tmp_path / "taken", head_dim=wrong)
    taken = import_run(tmp_path / "theirs", tmp_path / "taken", head_dim=head_dim)
    with CheckpointReader(open_checkpoint(taken.path)) as reader:
        for n, (name, weight) in enumerate(weights.items()):
            assert torch.equal(reader.weights(name, 0, weight.numel()), weight.flatten())
            for kind, whole in fused.items():
                own = torch.stack([x for x, part in zip(whole, of_row, strict=True) if part == n])
                found = reader.tensors([WantedSlice(kind, name, 0, weight.numel())])[kind]
                assert torch.equal(found, own.flatten()), (name, kind)
