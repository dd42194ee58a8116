"""Chats: their keys, the text that a template makes of them, which tokens are learned, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from text_data import loss_mask_of, opened, tokens_of, write_jsonl

from zfunc.train.data.tokenizer import BYTES, Tokenizer, open_tokenizer

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEADERS = (  # as Llama 3
    "{% for m in messages %}{% if loop.first %}{{ bos_token }}{% endif %}<|h|>{{ m.role }}<|/h|>\n\n"
    "{{ m.content | trim }}<|eot|>{% endfor %}{% if add_generation_prompt %}<|h|>assistant<|/h|>\n\n{% endif %}"
)
INST = (  # as Llama 2
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% if m.role == 'user' %}"
    "{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}{% else %}{{ ' ' + m.content + ' ' + eos_token }}"
    "{% endif %}{% endfor %}"
)
MARKED = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}!"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
)
THINKING = (  # as Qwen 3: the last turn alone has its thoughts
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think>\n</think>"
    "\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% endif %}"
)
ENDINGS = {  # of what is learned of a turn, by the template
    "chatml": (CHATML, "{}<|im_end|>\n"),
    "headers": (HEADERS, "{}<|eot|>"),
    "inst": (INST, " {} </s>"),
    "marked": (MARKED, "{}!"),
    "plain": (None, " {}</s>"),
}
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|h|>", "<|/h|>", "<|eot|>"]
TURNS = [("hi there", "Hello, größer!"), ("and now?", "  indented\n\nlines"), ("1+1", "2")]


def saved(folder: Path, template: str | None) -> Any:
    """A tokenizer as transformers saves it, of bytes with some merges."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=340, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(["assistant user Hello, hi there and now lines indented größer" * 9], trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", chat_template=template
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def messages(count: int, system: bool = False) -> list[dict[str, str]]:
    turns = [
        {"role": role, "content": text}
        for pair in TURNS[:count]
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    return [{"role": "system", "content": "Be brief."}, *turns] if system else turns


def learned(tokenizer: Tokenizer, ids: list[int], mask: list[int]) -> list[str]:
    """The texts of the runs of tokens that are learned."""
    raw = tokenizers.Tokenizer.from_file(tokenizer.name)
    runs: list[list[int]] = []
    for n, token in enumerate(ids):
        if mask[n]:
            runs += [] if n and mask[n - 1] else [[]]
            runs[-1].append(token)
    return [raw.decode(run, skip_special_tokens=False) for run in runs]


@pytest.mark.parametrize("name", ENDINGS)
def test_the_tokens_are_the_templates_and_the_assistants_turns_are_learned(name: str, tmp_path: Path) -> None:
    template, ending = ENDINGS[name]
    own = saved(tmp_path, template)
    tokenizer = open_tokenizer(tmp_path / "tokenizer.json")
    for count in (1, 2, 3):
        chat = messages(count, system=name in ("chatml", "headers"))
        corpus = opened(
            write_jsonl(tmp_path / f"{count}.jsonl", {"messages": chat}), tmp_path, tokenizer=tokenizer
        )
        ids = tokens_of(corpus)
        if template is not None:
            assert ids == own.apply_chat_template(chat)["input_ids"]
        if name == "marked":
            marks = own.apply_chat_template(chat, return_assistant_tokens_mask=True, return_dict=True)
            assert loss_mask_of(corpus) == marks["assistant_masks"]
            continue
        answers = [text.strip() if name == "headers" else text for _, text in TURNS[:count]]
        assert learned(tokenizer, ids, loss_mask_of(corpus)) == [ending.format(x) for x in answers]
        assert ids[-1] != own.eos_token_id or name in ("inst", "plain"), "no end token but the template's"
    stops = {"chatml": "<|im_end|>", "headers": "<|eot|>"}.get(name, "</s>")
    assert own.convert_tokens_to_ids(stops) in tokenizer.stops
    assert "chats: 1, written " + ("as User" if template is None else "by the chat template") in str(corpus)


def test_a_template_that_writes_earlier_turns_otherwise_gives_a_document_a_turn(tmp_path: Path) -> None:
    saved(tmp_path, THINKING)
    tokenizer = open_tokenizer(tmp_path / "tokenizer.json")
    path = write_jsonl(tmp_path / "a.jsonl", {"messages": messages(3)})
    corpus = opened(path, tmp_path, tokenizer=tokenizer)
    answers = [f"<think>\n</think>\n{answer}<|im_end|>\n" for _, answer in TURNS]
    assert learned(tokenizer, tokens_of(corpus), loss_mask_of(corpus)) == answers
    assert "1 files, 3 documents" in str(corpus)


def test_a_turn_with_weight_0_is_not_learned(tmp_path: Path) -> None:
    chat = messages(3)
    chat[3]["weight"] = 0  # type: ignore[typeddict-item]
    for template in (CHATML, MARKED):
        saved(tmp_path, template)
        tokenizer = open_tokenizer(tmp_path / "tokenizer.json")
        corpus = opened(write_jsonl(tmp_path / "a.jsonl", {"messages": chat}), tmp_path, tokenizer=tokenizer)
        texts = learned(tokenizer, tokens_of(corpus), loss_mask_of(corpus))
        assert [x.strip()[:1] for x in texts] == ["H", "2"]


def rendered(record: dict[str, Any], tmp_path: Path) -> bytes:
    return bytes(tokens_of(opened(write_jsonl(tmp_path / "a.jsonl", record), tmp_path, tokenizer=BYTES)))


def test_every_shape_of_a_chat_is_the_same(tmp_path: Path) -> None:
    expected = b"System: Be brief.\n\nUser: hi\n\nAssistant: Hello\0"
    hi, hello = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello"}
    for record in (
        {"messages": [{"role": "system", "content": "Be brief."}, hi, hello], "text": "somebody's own"},
        {"messages": [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}, hi, hello]},
        {
            "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "Hello"}],
            "system": "Be brief.",
        },
        {"instruction": "hi", "input": "", "output": "Hello", "system": "Be brief.", "text": "hi Hello"},
    ):
        assert rendered(record, tmp_path) == expected
    alpaca = {"instruction": "Add", "input": "1+1", "output": "2"}
    assert rendered(alpaca, tmp_path) == b"User: Add\n\n1+1\n\nAssistant: 2\0"


def test_chats_and_texts_keep_their_order(tmp_path: Path) -> None:
    records = ({"text": "a"}, {"instruction": "b", "output": "c"}, {"text": "d"})
    corpus = opened(write_jsonl(tmp_path / "a.jsonl", *records), tmp_path)
    assert bytes(tokens_of(corpus)) == b"a\0User: b\n\nAssistant: c\0d\0"
    assert loss_mask_of(corpus) == [1, 1, *[0] * 19, 1, 1, 1, 1, 1]


def test_a_template_that_refuses_a_chat_is_quoted(tmp_path: Path) -> None:
    saved(tmp_path, INST)
    path = write_jsonl(tmp_path / "a.jsonl", {"messages": messages(1, system=True)})
    with pytest.raises(ValueError, match="line 1: got a chat that the chat template refuses .roles must alt"):
        opened(path, tmp_path, tokenizer=open_tokenizer(tmp_path / "tokenizer.json"))
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    odd = [
        {"name": "default", "template": "{{ messages | length }}{% if add_generation_prompt %}?{% endif %}"}
    ]
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": odd}))
    path = write_jsonl(tmp_path / "a.jsonl", {"messages": messages(1)})
    with pytest.raises(ValueError, match="that writes turn 2 otherwise than it asks for it"):
        opened(path, tmp_path, tokenizer=open_tokenizer(tmp_path / "tokenizer.json"))
