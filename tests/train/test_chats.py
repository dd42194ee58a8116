"""Chats: the text that a template makes of them, which tokens are learned, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from text_data import loss_mask_of, opened, tokens_of, write_jsonl

from zfunc.train.data.tokenizer import Tokenizer, open_tokenizer

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
OPENED = HEADERS.replace("\n\n{% endif", "\n\n<think>\n{% endif")  # as DeepSeek R1
TOOLS = (  # as Qwen's, which leaves out roles that it does not know
    "{% if tools %}{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}{% for m in messages %}"
    "{% if m.role in ('system', 'user', 'assistant', 'tool') %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if 'tool_calls' in m %}{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if not (thinks | default(true)) %}</think>{% endif %}"
    "{% endif %}"
)
ODD = "{{ messages | length }}{% if add_generation_prompt %}?{% endif %}"
ENDINGS = {  # of what is learned of a turn, by the template
    "chatml": (CHATML, "{}<|im_end|>"),
    "headers": (HEADERS, "{}<|eot|>"),
    "inst": (INST, " {} </s>"),
    "marked": (MARKED, "{}!"),
}
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|h|>", "<|/h|>", "<|eot|>"]
TURNS = [("hi there", "Hello, größer!"), ("and now?", "  indented\n\nlines"), ("1+1", "2")]


def saved(folder: Path, template: Any) -> Any:
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


def corpus_of(folder: Path, *records: Any, **variables: Any) -> tuple[Tokenizer, Any]:
    """The tokenizer that was saved in a folder, and the corpus of records with it."""
    tokenizer = open_tokenizer(folder / "tokenizer.json", template_args=variables)
    return tokenizer, opened(write_jsonl(folder / "a.jsonl", *records), folder, tokenizer=tokenizer)


def messages(count: int, system: bool = False) -> list[dict[str, Any]]:
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
    for count in (1, 2, 3):
        chat = messages(count, system=name in ("chatml", "headers"))
        tokenizer, corpus = corpus_of(tmp_path, {"messages": chat, "text": "somebody's own"})
        ids = tokens_of(corpus)
        assert ids == own.apply_chat_template(chat)["input_ids"]
        if name == "marked":
            marks = own.apply_chat_template(chat, return_assistant_tokens_mask=True, return_dict=True)
            assert loss_mask_of(corpus) == marks["assistant_masks"]
            continue
        answers = [text.strip() if name == "headers" else text for _, text in TURNS[:count]]
        assert learned(tokenizer, ids, loss_mask_of(corpus)) == [ending.format(x) for x in answers]
        assert ids[-1] != own.eos_token_id or name == "inst", "no end token but the template's"
    stops = {"chatml": "<|im_end|>", "headers": "<|eot|>"}.get(name, "</s>")
    assert own.convert_tokens_to_ids(stops) in tokenizer.stops
    assert f"learned: {sum(loss_mask_of(corpus))} of {len(ids)}, in 1 document not all" in str(corpus)


def test_a_template_that_writes_earlier_turns_otherwise_gives_a_document_a_turn(tmp_path: Path) -> None:
    saved(tmp_path, THINKING)
    tokenizer, corpus = corpus_of(tmp_path, {"messages": messages(3)})
    answers = [f"<think>\n</think>\n{answer}<|im_end|>" for _, answer in TURNS]
    assert learned(tokenizer, tokens_of(corpus), loss_mask_of(corpus)) == answers
    assert "1 file, 3 documents" in str(corpus)


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_a_turn_with_weight_0_is_not_learned(template: str, tmp_path: Path) -> None:
    chat = messages(3)
    chat[3]["weight"] = 0
    saved(tmp_path, template)
    tokenizer, corpus = corpus_of(tmp_path, {"messages": chat})
    texts = learned(tokenizer, tokens_of(corpus), loss_mask_of(corpus))
    assert [x.strip()[:1] for x in texts] == ["H", "2"]
    none = write_jsonl(tmp_path / "b.jsonl", {"messages": [x | {"weight": 0} for x in chat]})
    with pytest.raises(ValueError, match="got nothing to learn in 1 document of .*b.jsonl, expected a label"):
        opened(none, tmp_path, tokenizer=tokenizer)


def test_chats_and_texts_keep_their_order(tmp_path: Path) -> None:
    saved(tmp_path, CHATML)
    chat = {"messages": messages(1)}
    records = {"text": "a"}, chat, {"text": "d"}
    _, corpus = corpus_of(tmp_path, *records)
    parts = [(tokens_of(x), loss_mask_of(x) or [1, 1]) for x in (corpus_of(tmp_path, r)[1] for r in records)]
    for n, whole in enumerate((tokens_of(corpus), loss_mask_of(corpus))):
        assert whole == [x for part in parts for x in part[n]]


@pytest.mark.parametrize(
    ("template", "system", "message"),
    [
        (INST, True, "line 1: got a chat that the chat template refuses .roles must alt"),
        (ODD, False, "that writes turn 2 otherwise than it asks for it"),
        (
            None,
            False,
            "line 1: got a chat for .*json, without a chat template, expected a tokenizer with one",
        ),
        (
            {"rag": CHATML},
            False,
            "line 1: got a chat for a tokenizer with the chat templates rag, expected one c",
        ),
    ],
)
def test_a_chat_that_cannot_be_written_is_refused(
    template: Any, system: bool, message: str, tmp_path: Path
) -> None:
    saved(tmp_path, template)
    with pytest.raises(ValueError, match=message):
        corpus_of(tmp_path, {"messages": messages(1, system=system)})


# --- formats of records -----------------------------------------------------------------------------------

ASKED, ANSWERED = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "now"}
WEATHER = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CALLS: list[dict[str, Any]] = [
    {"role": "assistant", "content": "a", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]},
    {"role": "tool", "content": "7"},
    {
        "role": "assistant",
        "content": "b",
        "tool_calls": [{"function": {"name": "g", "arguments": {"y": "z"}}}],
    },
]


def called(arguments: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
    }


FORMATS: dict[
    str, tuple[Any, list[Any], Any]
] = {  # a record, and its messages and tools as transformers has them
    "arguments as text": ({"messages": [ASKED, called('{"x": null}')]}, [ASKED, called({"x": None})], None),
    "no arguments": ({"messages": [ASKED, called("")]}, [ASKED, called({})], None),
    "no calls": (
        {"messages": [ASKED, ANSWERED | {"tool_calls": [], "function_call": {}}]},
        [ASKED, ANSWERED],
        None,
    ),
    "parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": x} for x in "hi"]}, ANSWERED]},
        [ASKED, ANSWERED],
        None,
    ),
    "json": (
        {"messages": json.dumps([ASKED, ANSWERED]), "tools": json.dumps([WEATHER])},
        [ASKED, ANSWERED],
        [WEATHER],
    ),
    "tools as texts": (
        {"messages": [ASKED, ANSWERED], "tools": [json.dumps(WEATHER)]},
        [ASKED, ANSWERED],
        [WEATHER],
    ),
    "tools of nothing": ({"messages": [ASKED, ANSWERED], "tools": "null"}, [ASKED, ANSWERED], None),
    "prompt and completion as json": (
        {"prompt": json.dumps([ASKED]), "completion": json.dumps([ANSWERED]), "tools": json.dumps([WEATHER])},
        [ASKED, ANSWERED],
        [WEATHER],
    ),
    "tools of no text": ({"messages": [ASKED, ANSWERED], "tools": ""}, [ASKED, ANSWERED], None),
    "no tools": ({"messages": [ASKED, ANSWERED], "tools": []}, [ASKED, ANSWERED], None),
    "developer": (
        {"messages": [{"role": "developer", "content": "a"}, ASKED, ANSWERED]},
        [{"role": "system", "content": "a"}, ASKED, ANSWERED],
        None,
    ),
    "the user's last turn": ({"messages": [ASKED, ANSWERED, ASKED]}, [ASKED, ANSWERED], None),
    "ShareGPT": (
        {"system": "a", "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "now"}]},
        [{"role": "system", "content": "a"}, ASKED, ANSWERED],
        None,
    ),
    "Alpaca": (
        {"instruction": "1", "input": "2", "output": "now", "text": "somebody's own"},
        [{"role": "user", "content": "1\n\n2"}, ANSWERED],
        None,
    ),
    "Alpaca without input": ({"instruction": "hi", "input": "", "output": "now"}, [ASKED, ANSWERED], None),
}


@pytest.mark.parametrize("name", FORMATS)
def test_the_text_of_a_format_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    record, chat, tools = FORMATS[name]
    own = saved(tmp_path, {"default": TOOLS, "tool_use": f"tools {TOOLS}"})
    tokenizer, corpus = corpus_of(tmp_path, record)
    assert tokens_of(corpus) == own.apply_chat_template(chat, tools=tools)["input_ids"]
    written = own.apply_chat_template(chat, tools=tools, tokenize=False).rpartition("assistant\n")[2]
    assert learned(tokenizer, tokens_of(corpus), loss_mask_of(corpus)) == [written.removesuffix("\n")]
    assert ("left out: 1 message after" in str(corpus)) == (name == "the user's last turn")


def test_of_messages_as_a_prompt_nothing_is_learned(tmp_path: Path) -> None:
    own = saved(tmp_path, CHATML)
    prompt, completion = [ASKED, ANSWERED, ASKED], [ANSWERED | {"content": "lines"}]
    tokenizer, corpus = corpus_of(tmp_path, {"prompt": prompt, "completion": completion})
    assert tokens_of(corpus) == own.apply_chat_template([*prompt, *completion])["input_ids"]
    assert learned(tokenizer, tokens_of(corpus), loss_mask_of(corpus)) == ["lines<|im_end|>"]


def test_a_table_of_arrow_gives_a_call_no_keys_of_others(tmp_path: Path) -> None:
    datasets, own = pytest.importorskip("datasets"), saved(tmp_path, TOOLS)
    chat = [ASKED, *CALLS]
    parameters = {"type": "object", "properties": {"x": {"type": "integer"}}}
    tools = [WEATHER, {"type": "function", "function": {"name": "g", "parameters": parameters}}]
    datasets.Dataset.from_list([{"messages": chat, "tools": tools}]).to_parquet(tmp_path / "a.parquet")
    tokenizer = open_tokenizer(tmp_path / "tokenizer.json")
    expected = own.apply_chat_template(chat, tools=tools)["input_ids"]
    assert tokens_of(opened(tmp_path / "a.parquet", tmp_path, tokenizer=tokenizer)) == expected


def test_a_turn_begins_where_it_is_written_otherwise_than_asked_for(tmp_path: Path) -> None:
    """As where prompts open a thought that the data does not have, or has."""
    own = saved(tmp_path, OPENED)
    answers = ["now", "<think>\nlines</think>now"]
    chat = [x for answer in answers for x in (ASKED, ANSWERED | {"content": answer})]
    tokenizer, corpus = corpus_of(tmp_path, {"messages": chat})
    assert tokens_of(corpus) == own.apply_chat_template(chat)["input_ids"]
    assert learned(tokenizer, tokens_of(corpus), loss_mask_of(corpus)) == [
        "now<|eot|>",
        "lines</think>now<|eot|>",
    ]


def test_a_template_has_its_variables(tmp_path: Path) -> None:
    """They are part of what names a cache."""
    saved(tmp_path, TOOLS.replace("{{ m.content }}", "{% if not thinks %}</think>{% endif %}{{ m.content }}"))
    given = [corpus_of(tmp_path, {"messages": [ASKED, ANSWERED]}, thinks=x) for x in (True, False)]
    texts = [learned(tokenizer, tokens_of(corpus), loss_mask_of(corpus)) for tokenizer, corpus in given]
    assert texts == [["now<|im_end|>"], ["now<|im_end|>"]]
    assert len(tokens_of(given[1][1])) > len(tokens_of(given[0][1]))
    assert given[0][0].digest != given[1][0].digest
