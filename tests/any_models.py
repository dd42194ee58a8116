"""Small models of many architectures with a batch each: of transformers, and classes of our own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zfunc

transformers = pytest.importorskip("transformers")

Made = tuple[nn.Module, Any, Any]  # the model, a batch, and its loss or None
VOCAB = 61
SIZE: dict[str, Any] = {
    **{"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "use_cache": False},
}
ENCODER = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}
SEQ2SEQ = {
    **{"vocab_size": VOCAB, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.0},
    **{
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
    },
    **{
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
        "use_cache": False,
    },
}
SPEECH: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SPEECH |= {"num_attention_heads": 4, "vocab_size": 11, "conv_dim": (8, 8), "conv_stride": (3, 2)}
SPEECH |= {"conv_kernel": (4, 3), "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
SPEECH |= {
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "feat_proj_dropout": 0.0,
}
SPEECH |= {"final_dropout": 0.0, "layerdrop": 0.0, "apply_spec_augment": False, "ctc_loss_reduction": "mean"}
WHISPER = {"num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 20}
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32, "use_cache": False}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}
MAMBA_2 = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "num_heads": 4, "head_dim": 16}
MAMBA_2 |= {"state_size": 8, "n_groups": 1, "chunk_size": 4, "expand": 2, "use_cache": False}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DISTILBERT = {
    "vocab_size": VOCAB,
    "dim": 32,
    "hidden_dim": 48,
    "n_layers": 3,
    "n_heads": 4,
    "qa_dropout": 0.0,
}
DISTILBERT |= {"dropout": 0.0, "attention_dropout": 0.0}
OPT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
OPT |= {"max_position_embeddings": 32, "word_embed_proj_dim": 32, "dropout": 0.0, "use_cache": False}
VISION = {"image_size": 16, "patch_size": 4, "num_channels": 3, "attention_dropout": 0.0}
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
EIGHT = {"image_size": 8, "patch_size": 4}
BLOOM = {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 3, "n_head": 4, "hidden_dropout": 0.0}
BLOOM |= {"attention_dropout": 0.0, "use_cache": False}
WINDOWED = ["sliding_attention", "full_attention", "sliding_attention"]
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
MAMBA |= {"mamba_chunk_size": 4, "mamba_expand": 2}
DEBERTA: dict[str, Any] = {"vocab_size": VOCAB, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
DEBERTA |= {"max_position_embeddings": 32}
SWIN = {"patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4}
DECODER = {"decoder_hidden_size": 16, "decoder_intermediate_size": 16, "decoder_num_attention_heads": 2}
DECODER |= {"decoder_num_hidden_layers": 1, "mask_ratio": 0.5}
HEADS = {"vocab_size": VOCAB, "hidden_size": 32, "num_attention_heads": 4, "use_cache": False}
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
LINEAR |= {"linear_value_head_dim": 8, "linear_conv_kernel_dim": 3}
LINEAR |= {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}


def ids(rows: int = 4, length: int = 10, start: int = 3) -> Tensor:
    return torch.randint(start, VOCAB, (rows, length))


def text(**more: Any) -> dict[str, Any]:
    x = ids()
    mask = torch.ones_like(x)
    mask[0, -3:] = 0
    return {"input_ids": x, "attention_mask": mask, "labels": x.masked_fill(mask == 0, -100), **more}


def of(config: Any, model: str, batch: Callable[[], Any], loss: Any = None) -> Callable[[], Made]:
    return lambda: (getattr(transformers, model)(config()), batch(), loss)


def config(kind: str, **given: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, f"{kind}Config")(**given)


def causal(kind: str, **given: Any) -> Callable[[], Made]:
    return of(config(kind, **SIZE | given), f"{kind}ForCausalLM", text)


def images(**more: Any) -> dict[str, Any]:
    return {"pixel_values": torch.randn(4, 3, 16, 16), **more}


def classes(n: int = 4) -> Tensor:
    return torch.arange(n) % 2


def pairs() -> dict[str, Any]:
    return images(input_ids=ids(), attention_mask=torch.ones(4, 10, dtype=torch.long), return_loss=True)


def speech(**more: Any) -> dict[str, Any]:
    """Waves, and as many labels of each as the rest of a row of -100 leaves."""
    labels, mask = torch.randint(1, 11, (4, 6)), torch.ones(4, 120, dtype=torch.long)
    for row, count in zip(labels, torch.randint(1, 7, (4,)).tolist(), strict=True):
        row[count:] = -100
    mask[0, 80:] = 0
    return {"input_values": torch.randn(4, 120), "attention_mask": mask, "labels": labels, **more}


def with_image(token: int, count: int, **more: Any) -> dict[str, Any]:
    x = ids(start=8)
    x[:, 1 : 1 + count] = token
    return images(input_ids=x, attention_mask=torch.ones_like(x), labels=x, **more)


def token_types(count: int) -> Tensor:
    """1 where `with_image` has tokens of an image, else 0."""
    return (torch.arange(10) - 1 < count).long().expand(4, 10).clone() * (torch.arange(10) > 0)


def with_images_of_sizes(*, places: bool = False) -> dict[str, Any]:
    """Images of 2 or 4 tokens, as a processor of Qwen3-VL makes them: kinds of tokens, or `places` of all."""
    x = ids(4, 10, start=8)
    grid = torch.tensor([[1, 4, 4], [1, 2, 4], [1, 4, 2], [1, 4, 4]])
    for row, count in zip(x, (grid.prod(-1) // 4).tolist(), strict=True):
        row[1], row[2 : 2 + count], row[2 + count] = 6, 4, 7
    kinds, images = (x == 4).int(), zfunc.Whole(torch.randn(int(grid.prod(-1).sum()), 96))
    given = {"input_ids": x, "attention_mask": torch.ones_like(x), "labels": x, "pixel_values": images}
    if not places:
        return given | {"image_grid_thw": grid, "mm_token_type_ids": kinds}
    model = transformers.Qwen3VLForConditionalGeneration(QWEN_VL()).model
    at, _ = model.get_rope_index(x, kinds, grid, attention_mask=torch.ones_like(x))
    return given | {"image_grid_thw": grid, "position_ids": zfunc.Whole(at)}


QWEN_VL = config(
    "Qwen3VL",
    text_config=SIZE
    | {
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
    },
    vision_config={
        **{"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": 4},
        **{"out_hidden_size": 32, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    },
    image_token_id=4,
    video_token_id=5,
    vision_start_token_id=6,
    vision_end_token_id=7,
)


# --- classes of our own ---------------------------------------------------------------------------------------


class UNet(nn.Module):
    """Skips across the middle, and a time."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1) for i in range(3))
        self.up = nn.ModuleList(nn.Conv2d(16, 8, 3, padding=1) for _ in range(3))
        self.out = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        skips = list[Tensor]()
        for layer in self.down:
            x = torch.relu(layer(x)) + t[:, None, None, None]
            skips.append(x)
        for layer in self.up:
            x = torch.relu(layer(torch.cat([x, skips.pop()], 1)))
        return self.out(x)


class DiTBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.modulation = nn.Linear(width, 6 * width)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale, gate, shift2, scale2, gate2 = self.modulation(F.silu(c))[:, None].chunk(6, -1)
        h = self.norms[0](x) * (1 + scale) + shift
        q, k, v = self.qkv(h).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + gate * self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + gate2 * self.mlp(self.norms[1](x) * (1 + scale2) + shift2)


class DiT(nn.Module):
    """A diffusion transformer: a condition that every block reads."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.time, self.label = nn.Linear(8, width), nn.Embedding(5, width)
        self.register_buffer("places", torch.randn(1, 16, width))
        self.blocks = nn.ModuleList(DiTBlock(width) for _ in range(2))
        self.out = nn.Linear(width, 48)

    def forward(self, x: Tensor, t: Tensor, label: Tensor) -> Tensor:
        places = torch.exp(-torch.arange(4, device=t.device) / 4)
        waves = torch.cat([(t[:, None] * places).sin(), (t[:, None] * places).cos()], -1)
        c = self.time(waves) + self.label(label)
        x = self.patch(x).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x, c)
        return (
            self.out(x)
            .unflatten(1, (4, 4))
            .unflatten(-1, (3, 4, 4))
            .permute(0, 3, 1, 4, 2, 5)
            .flatten(4)
            .flatten(2, 3)
        )


class JointBlock(nn.Module):
    """Two streams, each with its own weights, that attend to one another, as in SD3 and Flux."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.own = nn.ModuleList(DiTBlock(width) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        parts = [m.modulation(F.silu(c))[:, None].chunk(6, -1) for m in self.own]
        each = zip(self.own, (x, y), parts, strict=True)
        both = torch.cat([m.qkv(m.norms[0](z) * (1 + p[1]) + p[0]) for m, z, p in each], 1)
        q, k, v = both.unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        split, streams = seen.split([x.shape[1], y.shape[1]], 1), list[Tensor]()
        for m, z, p, o in zip(self.own, (x, y), parts, split, strict=True):
            h = z + p[2] * m.out(o)
            streams.append(h + p[5] * m.mlp(m.norms[1](h) * (1 + p[4]) + p[3]))
        return streams[0], streams[1]


class SD3(nn.Module):
    """Joint blocks over patches and words; of Flux as many `single` blocks over both in one row behind them."""

    def __init__(self, single: int = 0, width: int = 32) -> None:
        super().__init__()
        self.patch, self.words = nn.Conv2d(3, width, 4, 4), nn.Embedding(VOCAB, width)
        self.time = nn.Linear(1, width)
        self.joint = nn.ModuleList(JointBlock(width) for _ in range(2))
        self.single = nn.ModuleList(DiTBlock(width) for _ in range(single))
        self.out = nn.Linear(width, 48)

    def forward(self, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        x, y = self.patch(x).flatten(2).transpose(1, 2), self.words(words)
        c = self.time(t[:, None]) + y.mean(1)
        for block in self.joint:
            x, y = block(x, y, c)
        for block in self.single:
            x, y = block(torch.cat([x, y], 1), c).split([x.shape[1], y.shape[1]], 1)
        return self.out(x)


class VideoBlock(DiTBlock):
    """Self-attention over places and times, and attention to words."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.cross = nn.MultiheadAttention(width, 4, batch_first=True)

    def forward(self, x: Tensor, c: Tensor, words: Tensor) -> Tensor:  # pyright: ignore
        x = super().forward(x, c)
        return x + self.cross(x, words, words, need_weights=False)[0]


class Wan(nn.Module):
    """A diffusion transformer of videos [rows, channels, times, height, width]."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patch, self.words = nn.Conv3d(3, width, (1, 4, 4), (1, 4, 4)), nn.Embedding(VOCAB, width)
        self.time = nn.Linear(1, width)
        self.blocks = nn.ModuleList(VideoBlock(width) for _ in range(2))
        self.out = nn.Linear(width, 48)

    def forward(self, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        x, y, c = self.patch(x).flatten(2).transpose(1, 2), self.words(words), self.time(t[:, None])
        for block in self.blocks:
            x = block(x, c, y)
        return self.out(x)


class ResidualBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.bn1, self.bn2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += x
        return self.relu(y)


class ResNet(nn.Module):
    """Running statistics, and writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.layer1 = nn.Sequential(*(ResidualBlock(8) for _ in range(2)))
        self.down = nn.Conv2d(8, 16, 1, 2)
        self.layer2 = nn.Sequential(*(ResidualBlock(16) for _ in range(2)))
        self.fc = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return self.fc(self.layer2(self.down(self.layer1(x))).mean((2, 3)))


class Translator(nn.Module):
    """An LSTM encoder, and a decoder that attends to it; one embedding in three places."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.encoder = nn.ModuleList(nn.LSTM(16, 16, batch_first=True) for _ in range(2))
        self.decoder = nn.ModuleList(nn.LSTM(16, 16, batch_first=True) for _ in range(2))
        self.out = nn.Linear(32, 16)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        x, states = self.embed(source), []
        for layer in self.encoder:
            x, state = layer(x)
            states.append(state)
        y = self.embed(target)
        for layer, state in zip(self.decoder, states, strict=True):
            y, _ = layer(y, state)
        seen = torch.softmax(y @ x.mT, -1) @ x
        return F.linear(self.out(torch.cat([y, seen], -1)), self.embed.weight)


class GraphNetwork(nn.Module):
    """Messages along edges, summed where they arrive."""

    def __init__(self) -> None:
        super().__init__()
        self.node = nn.Linear(4, 16)
        self.messages = nn.ModuleList(nn.Linear(32, 16) for _ in range(2))
        self.updates = nn.ModuleList(nn.GRUCell(16, 16) for _ in range(2))
        self.out = nn.Linear(16, 1)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        x = self.node(nodes)  # [graphs, nodes, 16]
        index = edges[..., None].expand(*edges.shape, 16)  # [graphs, edges, 2, 16]
        for message, update in zip(self.messages, self.updates, strict=True):
            ends = x.gather(1, index[:, :, 0]), x.gather(1, index[:, :, 1])
            sent = torch.relu(message(torch.cat(ends, -1)))
            sums = torch.zeros_like(x).scatter_add(1, index[:, :, 1], sent)
            x = update(sums.flatten(0, 1), x.flatten(0, 1)).view_as(x)
        return self.out(x).mean(1)


def next_token(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def noised(times: int = 0) -> tuple[dict[str, Tensor], Tensor]:
    """Images, or videos of some `times`, with a time and words each, and what their patches should become."""
    frames = (times,) if times else ()
    x = torch.randn(4, 3, *frames, 16, 16)
    return {"x": x, "t": torch.rand(4), "words": ids(4, 5)}, torch.randn(4, 16 * max(1, times), 48)


def edges() -> Tensor:
    return torch.randint(0, 6, (4, 9, 2))


def adapted(made: Callable[[], Made], *, several: bool = False, **given: Any) -> Callable[[], Made]:
    """A model with adapters of peft that are not zero, each tensor with two if `several`."""

    def with_adapters() -> Made:
        peft, (model, batch, loss) = pytest.importorskip("peft"), made()
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, **given))
        if several:
            model.add_adapter("another", peft.LoraConfig(r=2, **given))
            model.base_model.set_adapter(["default", "another"])
        for p in model.parameters():
            p.data.add_(torch.randn_like(p) * 0.05 * p.requires_grad)
        return model, batch, loss

    return with_adapters


class Transcriber(nn.Module):
    """A recurrent model of a small vocabulary with the loss of CTC, of targets and lengths as `given` has them."""

    def __init__(self, given: str = "in rows", **loss: Any) -> None:
        super().__init__()
        self.given, self.loss = given, nn.CTCLoss(**loss)
        self.rows = nn.LSTM(6, 16, batch_first=True)
        self.layers, self.head = nn.ModuleList(nn.Linear(16, 16) for _ in range(3)), nn.Linear(16, 7)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        x, _ = self.rows(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        scores, known = self.head(x).log_softmax(-1).transpose(0, 1), targets > 0
        times, lengths = torch.full((len(targets),), len(scores)), known.sum(-1)
        if self.given == "by masked_select":
            targets = targets.masked_select(known)
        elif self.given == "by an index":
            targets = targets[known]
        elif self.given == "lengths as numbers":
            times, lengths = (len(scores),) * len(targets), (1,) * len(targets)
        elif self.given == "too short":
            times = times // 4
        return self.loss(scores, targets, times, lengths).mean()


def spoken(rows: int = 4, longest: int = 5) -> tuple[Tensor, Tensor]:
    """Vectors [rows, 12, 6], and from 1 to `longest` targets of each row, behind which are zeros."""
    targets, counts = torch.randint(1, 7, (rows, 5)), torch.randint(1, 1 + longest, (rows, 1))
    return torch.randn(rows, 12, 6), targets * (torch.arange(5) < counts)


MODELS: dict[str, Callable[[], Made]] = {
    "T5": of(
        config(
            "T5",
            vocab_size=VOCAB,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            use_cache=False,
        ),
        "T5ForConditionalGeneration",
        text,
    ),
    "RoBERTa, tokens": of(config("Roberta", **ENCODER, vocab_size=VOCAB), "RobertaForMaskedLM", text),
    "ELECTRA, words": of(
        config("Electra", **ENCODER, vocab_size=VOCAB, embedding_size=16),
        "ElectraForTokenClassification",
        lambda: text(labels=ids() % 2),
    ),
    "DistilBERT, spans": of(
        config("DistilBert", **DISTILBERT),
        "DistilBertForQuestionAnswering",
        lambda: {
            **{name: x for name, x in text().items() if name != "labels"},
            **{"start_positions": classes(), "end_positions": classes() + 1},
        },
    ),
    "Longformer": of(
        config("Longformer", **ENCODER, vocab_size=VOCAB, attention_window=[4] * 3),
        "LongformerForSequenceClassification",
        lambda: text(labels=classes()),
    ),
    "LED": of(
        config("LED", **SEQ2SEQ, attention_window=[4, 4], attention_dropout=0.0),
        "LEDForConditionalGeneration",
        text,
    ),
    "BEiT": of(
        config("Beit", **ENCODER, image_size=16, patch_size=4, drop_path_rate=0.0),
        "BeitForImageClassification",
        lambda: images(labels=classes()),
    ),
    "ConvNeXt": of(
        config("ConvNext", hidden_sizes=[8, 16], depths=[2, 2], num_stages=2, image_size=16),
        "ConvNextForImageClassification",
        lambda: images(labels=classes()),
    ),
    "Llama": causal("Llama"),
    "BLOOM": of(config("Bloom", **BLOOM), "BloomForCausalLM", text),
    "Phi-3.5 MoE": causal("Phimoe", num_local_experts=4, router_jitter_noise=0.0, input_jitter_noise=0.0),
    "RecurrentGemma": causal("RecurrentGemma", lru_width=32, attention_window_size=6, conv1d_width=3),
    "Mistral": causal("Mistral", sliding_window=4),
    "Gemma 2": causal("Gemma2", head_dim=8, sliding_window=4),
    "OLMo 2": causal("Olmo2"),
    "Phi-3": causal("Phi3"),
    "GPT-NeoX": causal("GPTNeoX"),
    "OPT": of(config("OPT", **OPT), "OPTForCausalLM", text),
    "Mamba": of(
        config("Mamba", vocab_size=VOCAB, hidden_size=32, num_hidden_layers=3, state_size=4, use_cache=False),
        "MambaForCausalLM",
        lambda: {"input_ids": ids(), "labels": ids()},
    ),
    "BART": of(config("Bart", **SEQ2SEQ, max_position_embeddings=32), "BartForConditionalGeneration", text),
    "Whisper": of(
        config("Whisper", **SEQ2SEQ, **WHISPER, suppress_tokens=None, begin_suppress_tokens=None),
        "WhisperForConditionalGeneration",
        lambda: {"input_features": torch.randn(4, 8, 20), "labels": ids()},
    ),
    "Wav2Vec2, CTC": of(config("Wav2Vec2", **SPEECH), "Wav2Vec2ForCTC", speech),
    "Wav2Vec2, classes": of(
        config("Wav2Vec2", **SPEECH),
        "Wav2Vec2ForSequenceClassification",
        lambda: speech(labels=classes()),
    ),
    "BERT, classes": of(
        config("Bert", **ENCODER, vocab_size=VOCAB),
        "BertForSequenceClassification",
        lambda: text(labels=classes()),
    ),
    "ViT": of(
        config("ViT", **ENCODER, **VISION), "ViTForImageClassification", lambda: images(labels=classes())
    ),
    "CLIP": of(
        config("CLIP", text_config=TOWER | {"vocab_size": VOCAB}, vision_config=TOWER | VISION),
        "CLIPModel",
        pairs,
    ),
    "SigLIP": of(
        config(
            "Siglip",
            text_config=TOWER | {"vocab_size": VOCAB, "max_position_embeddings": 10},
            vision_config=TOWER | VISION,
        ),
        "SiglipModel",
        pairs,
    ),
    "DINOv2": of(
        config(
            "Dinov2",
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            mlp_ratio=2,
            image_size=16,
            patch_size=4,
        ),
        "Dinov2ForImageClassification",
        lambda: images(labels=classes()),
    ),
    "LLaVA": of(
        config(
            "Llava",
            text_config=transformers.LlamaConfig(**SIZE),
            vision_config=transformers.CLIPVisionConfig(**TOWER, image_size=8, patch_size=4),
            image_token_index=4,
        ),
        "LlavaForConditionalGeneration",
        lambda: with_image(4, 4) | {"pixel_values": torch.randn(4, 3, 8, 8)},
    ),
    "Jamba": causal(
        "Jamba",
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=2,
        use_mamba_kernels=False,
        mamba_d_state=4,
        mamba_dt_rank=4,
    ),
    "Falcon-H1": causal("FalconH1", **MAMBA, mamba_d_ssm=64),
    "Mamba 2": of(
        config("Mamba2", **MAMBA_2),
        "Mamba2ForCausalLM",
        lambda: {name: x for name, x in text().items() if name != "attention_mask"},
    ),
    "Qwen3-Next": causal("Qwen3Next", **LINEAR, **EXPERTS, head_dim=16),
    "LFM2": causal("Lfm2", layer_types=["conv", "full_attention", "conv"], block_multiple_of=8),
    "GPT-2": of(config("GPT2", **GPT2), "GPT2LMHeadModel", text),
    "Qwen3": causal("Qwen3", head_dim=12),
    "Mixtral": causal("Mixtral", num_local_experts=4, num_experts_per_tok=2, output_router_logits=True),
    "Mixtral, LoRA of its experts": adapted(
        causal("Mixtral", num_local_experts=4, num_experts_per_tok=2),
        several=True,
        target_modules=["q_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj", "mlp.gate.weight"],
    ),
    "U-Net": lambda: (
        UNet(),
        ((torch.randn(4, 3, 8, 8), torch.randn(4)), torch.randn(4, 3, 8, 8)),
        F.mse_loss,
    ),
    "DiT": lambda: (
        DiT(),
        ({"x": torch.randn(4, 3, 16, 16), "t": torch.rand(4), "label": classes()}, torch.randn(4, 3, 16, 16)),
        F.mse_loss,
    ),
    "ResNet": lambda: (ResNet(), (torch.randn(4, 3, 8, 8), classes()), F.cross_entropy),
    "LSTM seq2seq": lambda: (Translator(), ((ids(4, 4), ids(4, 3)), ids(4, 3)), next_token),
    "graph network": lambda: (
        GraphNetwork(),
        ((torch.randn(4, 6, 4), edges()), torch.randn(4, 1)),
        F.mse_loss,
    ),
    "SD3": lambda: (SD3(), noised(), F.mse_loss),
    "Flux": lambda: (SD3(single=2), noised(), F.mse_loss),
    "Wan": lambda: (Wan(), noised(2), F.mse_loss),
    "MPNet": of(config("MPNet", **ENCODER, vocab_size=VOCAB), "MPNetForMaskedLM", text),
    "DeBERTa": of(
        config("DebertaV2", **ENCODER, **DEBERTA),
        "DebertaV2ForTokenClassification",
        lambda: text(labels=ids() % 2),
    ),
    "ModernBERT": of(config("ModernBert", **SIZE, local_attention=8), "ModernBertForMaskedLM", text),
    "mBART": of(
        config("MBart", **SEQ2SEQ, max_position_embeddings=32), "MBartForConditionalGeneration", text
    ),
    "Pegasus": of(
        config("Pegasus", **SEQ2SEQ, max_position_embeddings=32), "PegasusForConditionalGeneration", text
    ),
    "Marian": of(config("Marian", **SEQ2SEQ, max_position_embeddings=32), "MarianMTModel", text),
    "Swin": of(
        config("Swin", **SWIN, image_size=16, drop_path_rate=0.0),
        "SwinForImageClassification",
        lambda: images(labels=classes()),
    ),
    "ViT, masked": of(
        config("ViTMAE", **ENCODER, **VISION, **DECODER),
        "ViTMAEForPreTraining",
        lambda: images(noise=torch.rand(4, 16)),
    ),
    "BLIP": of(
        config(
            "Blip",
            text_config=TOWER | {"vocab_size": VOCAB, "encoder_hidden_size": 32, "hidden_dropout_prob": 0.0},
            vision_config=TOWER | VISION,
        ),
        "BlipForConditionalGeneration",
        lambda: images(input_ids=ids(), labels=ids()),
    ),
    "Falcon": of(config("Falcon", **HEADS, num_hidden_layers=3), "FalconForCausalLM", text),
    "MPT": of(
        config("Mpt", vocab_size=VOCAB, d_model=32, n_layers=3, n_heads=4, max_seq_len=32, use_cache=False),
        "MptForCausalLM",
        text,
    ),
    "GPT-J": of(config("GPTJ", **GPT2, rotary_dim=4), "GPTJForCausalLM", text),
    "StarCoder 2": causal("Starcoder2", residual_dropout=0.0, embedding_dropout=0.0),
    "Granite": causal("Granite"),
    "Cohere": causal("Cohere"),
    "StableLM": causal("StableLm"),
    "Phi": causal("Phi", partial_rotary_factor=0.5),
    "Gemma 3": of(config("Gemma3Text", **SIZE, head_dim=8, sliding_window=4), "Gemma3ForCausalLM", text),
    "Gemma 3, images": of(
        config(
            "Gemma3",
            text_config=SIZE | {"head_dim": 8, "sliding_window": 4, "layer_types": WINDOWED},
            vision_config=TOWER | EIGHT,
            mm_tokens_per_image=4,
            image_token_index=4,
            boi_token_index=5,
            eoi_token_index=6,
        ),
        "Gemma3ForConditionalGeneration",
        lambda: with_image(4, 4, pixel_values=torch.randn(4, 3, 8, 8), token_type_ids=token_types(4)),
    ),
    "Qwen3-VL, images": of(QWEN_VL, "Qwen3VLForConditionalGeneration", with_images_of_sizes),
    "Qwen3-VL, places": of(
        QWEN_VL, "Qwen3VLForConditionalGeneration", lambda: with_images_of_sizes(places=True)
    ),
    "OLMoE": causal("Olmoe", **EXPERTS),
    "Qwen2-MoE": causal("Qwen2Moe", **EXPERTS, shared_expert_intermediate_size=16),
    "Qwen3.5": of(config("Qwen3_5Text", **SIZE, **LINEAR, head_dim=16), "Qwen3_5ForCausalLM", text),
    "Blenderbot": of(
        config("Blenderbot", **SEQ2SEQ, max_position_embeddings=32),
        "BlenderbotForConditionalGeneration",
        text,
    ),
    "PaliGemma": of(
        config(
            "PaliGemma",
            text_config=SIZE | {"model_type": "gemma", "head_dim": 8},
            vision_config=TOWER | EIGHT | {"model_type": "siglip_vision_model", "projection_dim": 32},
            image_token_index=4,
            projection_dim=32,
        ),
        "PaliGemmaForConditionalGeneration",
        lambda: with_image(4, 4, pixel_values=torch.randn(4, 3, 8, 8), token_type_ids=ids() * 0 + 1),
    ),
    "InternVL": of(
        config(
            "InternVL",
            text_config=SIZE | {"model_type": "qwen2"},
            vision_config=TOWER | {"image_size": [16, 16], "patch_size": [4, 4]},
            image_token_id=4,
            image_seq_length=4,
        ),
        "InternVLForConditionalGeneration",
        lambda: with_image(4, 4),
    ),
}
