"""Tokenizers as transformers reads their folders; long texts, tokenized in bounded calls."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from text_data import opened, tokens_of, write_jsonl

from zfunc.train.data.tokenizer import BYTES, Located, check_template, in_calls, open_tokenizer

WORDS = ["the", "of", "schedule", "gradient", "über", "日本語のテキスト", "🙂", "x=1;", "1,024", "don't"]
WORDS += ["\n\n", "    "]


def byte_pairs(kind: str) -> Any:
    """A tokenizer trained on such words: of bytes as GPT-2's, or of characters as SentencePiece's."""
    tokenizers = pytest.importorskip("tokenizers")
    parts = tokenizers.pre_tokenizers
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=None if kind == "bytes" else "<unk>"))
    of_bytes = parts.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = of_bytes if kind == "bytes" else parts.Metaspace()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<unk>"],
        initial_alphabet=parts.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 3, trainer)
    return tokenizer


@pytest.mark.parametrize("kind", ["bytes", "characters"])
def test_a_long_text_is_cut_before_spaces_and_loses_no_character(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Words that a space begins have the tokens of the whole; elsewhere those beside a cut may be others."""
    library, calls = byte_pairs(kind), list[int]()

    def locate(texts: Sequence[str]) -> list[Located]:
        calls.append(sum(map(len, texts)))
        made = library.encode_batch(list(texts), add_special_tokens=False)
        return [(np.array(x.ids), np.array(x.offsets).reshape(-1, 2)) for x in made]

    monkeypatch.setattr("zfunc.train.data.tokenizer.CALL", 4096)
    rng = random.Random(kind)
    words = [x for x in WORDS if x.strip()]
    usual = " ".join(rng.choice(words) for _ in range(3_000))
    (whole,) = locate([usual])
    calls.clear()
    ((ids, spans),) = in_calls(locate, [usual])
    assert len(calls) > 1
    assert max(calls) <= 2 * 4096
    assert ids.tolist() == whole[0].tolist()
    assert spans.tolist() == whole[1].tolist()
    ((ids, spans),) = in_calls(locate, ["a" * 9_000])
    assert (spans[0, 0], spans[-1, 1]) == (0, 9_000)
    assert (spans[1:, 0] <= spans[:-1, 1]).all()


def test_texts_are_tokenized_in_calls_that_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zfunc.train.data.tokenizer.CALL", 30)
    calls = list[list[str]]()

    def locate(texts: Sequence[str]) -> list[Located]:
        calls.append(list(texts))
        places = (np.arange(len(text)) for text in texts)
        return [(BYTES.encode(["a" * len(at)])[0], np.stack([at, at + 1], 1)) for at in places]

    texts = ["a" * (n % 13) for n in range(40)]
    found = [(ids.tolist(), spans.tolist()) for ids, spans in in_calls(locate, texts)]
    assert found == [([97] * n, [[at, at + 1] for at in range(n)]) for n in map(len, texts)]
    assert all(sum(map(len, call)) <= 30 + 12 for call in calls)


# --- folders ----------------------------------------------------------------------------------------------

SPECIALS = ["<unk>", "<s>", "</s>", "<pad>"]
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
FAST = {"tokenizer_class": "PreTrainedTokenizerFast", **NAMES}
MORE = {
    "content": "<|x|>",
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "single_word": False,
    "special": True,
}
TEMPLATE = "{% for m in messages %}{{ bos_token }}{{ m.content }}{{ eos_token }}{% endfor %}"
SHAPES: dict[
    str, tuple[str, str, dict[str, Any]]
] = {  # special tokens around a text, kind, files beside tokenizer.json
    "GPT-2": ("", "bytes", {"tokenizer_config.json": {**NAMES, "tokenizer_class": "GPT2Tokenizer"}}),
    "Qwen 2": ("", "bytes", {"tokenizer_config.json": {**NAMES, "tokenizer_class": "Qwen2Tokenizer"}}),
    "Llama 3": ("<s> $A", "bytes", {"tokenizer_config.json": FAST}),
    "Llama 2": (
        "<s> $A",
        "characters",
        {"tokenizer_config.json": {**NAMES, "tokenizer_class": "LlamaTokenizer"}},
    ),
    "Llama 2, of bytes": (
        "<s> $A",
        "bytes",
        {"tokenizer_config.json": {**NAMES, "tokenizer_class": "LlamaTokenizerFast"}},
    ),
    "Gemma": (
        "<s> $A",
        "characters",
        {"tokenizer_config.json": {**NAMES, "tokenizer_class": "GemmaTokenizer"}},
    ),
    "both ends": ("<s> $A </s>", "bytes", {"tokenizer_config.json": FAST}),
    "an end": ("$A </s>", "bytes", {"tokenizer_config.json": FAST}),
    "BOS asked for": ("", "bytes", {"tokenizer_config.json": FAST | {"add_bos_token": True}}),
    "no BOS asked for": ("<s> $A", "bytes", {"tokenizer_config.json": FAST | {"add_bos_token": False}}),
    "EOS asked for": ("<s> $A", "bytes", {"tokenizer_config.json": FAST | {"add_eos_token": True}}),
    "added tokens": ("", "bytes", {"tokenizer_config.json": FAST | {"added_tokens_decoder": {"400": MORE}}}),
    "extra tokens": ("", "bytes", {"tokenizer_config.json": FAST | {"extra_special_tokens": ["<|x|>"]}}),
    "named tokens": (
        "",
        "bytes",
        {"tokenizer_config.json": FAST | {"extra_special_tokens": {"x_token": "<|x|>"}}},
    ),
    "older tokens": ("", "bytes", {"tokenizer_config.json": FAST | {"additional_special_tokens": ["<|x|>"]}}),
    "map of tokens": ("", "bytes", {"special_tokens_map.json": NAMES, "added_tokens.json": {"<|x|>": 400}}),
    "alone": ("<s> $A", "bytes", {}),
    "template": ("", "bytes", {"tokenizer_config.json": FAST | {"chat_template": TEMPLATE}}),
    "template file": ("", "bytes", {"tokenizer_config.json": FAST, "chat_template.jinja": TEMPLATE}),
    "templates": (
        "",
        "bytes",
        {"tokenizer_config.json": FAST | {"chat_template": [{"name": "default", "template": TEMPLATE}]}},
    ),
    "template files": (
        "",
        "bytes",
        {
            "tokenizer_config.json": FAST,
            "chat_template.jinja": "{{1/0}}",
            "additional_chat_templates/default.jinja": TEMPLATE,
        },
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_folder_is_read_as_transformers_reads_it(name: str, tmp_path: Path) -> None:
    """Documents have its tokens around them once, and the end token; digests are all different."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    around, kind, files = SHAPES[name]
    library = byte_pairs(kind)
    library.add_special_tokens(SPECIALS)
    if around:
        pairs = [(x, library.token_to_id(x)) for x in ("<s>", "</s>")]
        library.post_processor = tokenizers.processors.TemplateProcessing(single=around, special_tokens=pairs)
    library.save(str(tmp_path / "tokenizer.json"))
    for file, content in files.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(content if isinstance(content, str) else json.dumps(content))
    own = transformers.AutoTokenizer.from_pretrained(tmp_path)
    tokenizer = open_tokenizer(tmp_path / "tokenizer.json", end=library.token_to_id("</s>"))
    end = own.eos_token_id or library.token_to_id("</s>")
    assert (tokenizer.end, tokenizer.vocab_size) == (end, max(own.get_vocab().values()) + 1)
    texts = ["the schedule of<|x|>", "über the gradient"]
    records = [
        {"text": texts[0]},
        {"prompt": texts[0], "completion": texts[1]},
        {"text": f"<s>{texts[0]}</s>"},
    ]
    corpus = opened(write_jsonl(tmp_path / "a.jsonl", *records), tmp_path, tokenizer=tokenizer)
    plain = [own(text, add_special_tokens=False).input_ids for text in (texts[0], "".join(texts))]
    ids = own(texts[0]).input_ids
    before, after = ids[: len(ids) - len(plain[0]) - (ids[-1] == end)], [end]
    assert ids == [*before, *plain[0], *after[: ids[-1] == end]]
    whole = own(records[2]["text"], add_special_tokens=False).input_ids
    expected = [*before, *plain[0], *after, *before, *plain[1], *after, *whole]
    assert tokens_of(corpus) == expected
    mask = [*corpus.train.loss_mask.tolist(), *corpus.held_out.loss_mask.tolist()]  # pyright: ignore
    first = len(before) + len(plain[0]) + 1
    assert mask.index(False) == first
    assert mask.count(False) == first - 1
    assert ("documents begin with" in str(corpus)) == bool(before)
    if tokenizer.chat is None:
        assert own.chat_template is None
    else:
        from zfunc.train.data.records import Chat

        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        assert [text for text, _ in tokenizer.chat.render(Chat(tuple(chat), ""))] == [
            own.apply_chat_template(chat, tokenize=False)
        ]


@pytest.mark.parametrize(
    "content", [b'{"chat_template": ', b"\xff", b"[]", b'{"chat_template": [{"name": "tools"}]}']
)
def test_what_is_no_configuration_is_left_to_who_opens_the_tokenizer(content: bytes, tmp_path: Path) -> None:
    """It names the file; a template alone is checked before."""
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    check_template(tmp_path)
