"""Records: what the keys of a record mean, and its chat, in any of the usual formats, as messages for a template.

A chat template reads messages of a role and a text, and calls of tools with their arguments as an object. Data has
chats in the formats of OpenAI, ShareGPT, Alpaca and TRL, with texts in parts and JSON as text. A chat that cannot
be brought into the template's form is refused with its place: the template would write something else.
"""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any

from attrs import frozen

from zfunc.errors import refuse

Message = dict[str, Any]  # "role", "content", and what else the template reads
IDS, LABELS, MASK = "input_ids", "labels", "attention_mask"
CHAT, ASSISTANT = "chat", "assistant"
RECORDS = (  # the keys that make a record a document, and keys read beside them; the first pair that fits holds
    ((IDS,), (LABELS, MASK)),
    (("messages",), ("tools",)),  # OpenAI; before the text that somebody made of them
    (("conversations",), ("system", "tools")),  # ShareGPT
    (("prompt", "completion"), ("tools",)),  # texts, or messages, as TRL has them
    (("instruction", "output"), ("input", "system")),  # Alpaca
    (("text",), ()),
)
PREFERENCES = (
    (("chosen", "rejected", "conversations"), ("prompt", "system", "tools")),  # LLaMA-Factory: of the prompt
    (("chosen", "rejected"), ("prompt", "tools")),
)
EXPECTED = "expected text, or prompt and completion, or messages"
PAIRS = "expected a prompt, and two answers that differ as chosen and rejected, of text or messages"
EXAMPLE = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
_MEDIA = frozenset(("image", "video", "audio"))  # keys of LLaVA and others, with or without an "s"
_ROLES = {  # of ShareGPT
    **{"system": "system", "human": "user", "user": "user", "tool": "tool", "observation": "tool"},
    **{"gpt": ASSISTANT, "chatgpt": ASSISTANT, "model": ASSISTANT, ASSISTANT: ASSISTANT},
}


@frozen(eq=False)
class Document:
    """A document before it is tokenized. `values` are a `Chat`, the bytes of a text file, or the values of a record
    by key, without the keys that zfunc does not read; `where` is the file and line, for errors.
    """

    kind: str  # CHAT, "bytes", or the first key in RECORDS of the record
    values: Any
    where: str = ""


@frozen
class Chat:
    """The messages of a record, whose file and line are `where`. A message whose weight is 0 is not learned."""

    messages: tuple[Message, ...]
    where: str
    tools: list[Any] | None = None
    weights: tuple[float, ...] = ()  # of the messages; () is 1 for each


def read_keys(names: Collection[str], kinds: Any = RECORDS) -> tuple[str, ...]:
    """The names among `names`, keys of a record or columns of a table, that zfunc reads. `kinds` are pairs
    (required keys, optional keys); the first whose required keys are all in `names` counts; () if none does.

    >>> read_keys(["id", "text"]), read_keys(["text", "messages"]), read_keys(["id"])
    (('text',), ('messages',), ())
    """
    found = ((*keys, *(x for x in more if x in names)) for keys, more in kinds if {*keys} <= {*names})
    return next(found, ())


def refuse_preferences(record: Mapping[str, Any], where: str) -> None:
    """Raise ValueError if `record` is a preference, whose rejected half must not be learned."""
    keys = ("completion", "label") if isinstance(record.get("label"), bool) else ("chosen", "rejected")
    if {*keys} <= record.keys():
        way = "pass `loss=dpo`, or " if "chosen" in keys else ""
        do = f"{way}keep what is to be learned, under one of these names"
        refuse(where, f"a preference ({', '.join(keys)}) with a loss of tokens, {EXPECTED}", do=do)


def refuse_media(record: Mapping[str, Any], others: Iterable[str], where: str) -> None:
    """Raise ValueError if a text in `record` has the mark of an image, video or sound in one of the `others`, its
    keys that are not read: the mark would be learned as a text."""
    for kind in _MEDIA.intersection(x.removesuffix("s") for x in others):
        if (mark := f"<{kind}>") in str(record):
            got = f"a text with {mark}, in the place of what the record has under {kind!r} beside it"
            refuse(where, f"{got}, {EXPECTED}", do="leave it out, or take the mark out of the text")


def preference_of(record: Any, where: str, counts: Counter[str]) -> list[Document]:
    """The two documents of a preference, each the prompt with one answer, the chosen before the rejected, as texts
    or as messages. A prompt may be `conversations`; without one of messages, it is what both answers begin with,
    which is no part of them beside a prompt either.

    `counts` counts unread keys. Raises ValueError, with the place `where`, for any other record."""
    if not isinstance(record, dict) or not {"chosen", "rejected"} <= record.keys():
        got = f"an object with {', '.join(sorted(record))}" if isinstance(record, dict) else repr(record)
        got = f"{got:.200} with `loss=dpo`, {PAIRS}"
        refuse(where, got, do="leave `loss` out to learn all that is in the data, or write preferences")
    counts.update(f"key {name}" for name in record.keys() - {*read_keys(record, PREFERENCES)})
    prompt, *answers = (record.get(x) for x in ("prompt", "chosen", "rejected"))
    prompt = prompt or record.get("conversations") or None
    answers = [[x] if isinstance(x, Mapping) else x for x in answers]
    answers = [json.loads(x) if _is_json_of_messages(x) else x for x in answers]
    prompt = json.loads(prompt) if _is_json_of_messages(prompt) else prompt
    if answers[0] and answers[0] == answers[1]:
        raise ValueError(
            f"{where}: got one answer as chosen and rejected, {PAIRS}: correct it, or leave it out"
        )
    if all(isinstance(x, list) for x in answers):
        pairs = enumerate(zip(*answers, strict=False))
        shared = next((n for n, (a, b) in pairs if a != b), min(map(len, answers)))
        own, listed = answers[0][:shared], isinstance(prompt, list)
        said, asked = _spoken(own), _spoken(prompt if listed else [])
        if not listed:
            told = prompt in (None, "") or (own and _text_of_message(own[-1]) == prompt)
            prompt = own if told else []  # a text that is not what the answers answer
        elif said[: len(asked)] == asked:
            prompt = own  # of whole chats
        elif said != asked[len(asked) - shared :]:
            whole = not record.get("prompt") and asked[:shared] == said  # `conversations` is such a chat, too
            prompt, shared = (own, shared) if whole else (prompt, 0)
        answers = [x[shared:] for x in answers]
    if not prompt or not all(answers):
        got = f"a preference ({', '.join(record):.200}) without a prompt, or without an answer, {PAIRS}"
        refuse(where, got, do="correct it")
    if isinstance(prompt, list) and "conversations" in record and (system := record.get("system")):
        told = isinstance(first := _spoken(prompt)[0], tuple) and first[0] == "system"
        prompt = prompt if told else [{"role": "system", "content": system}, *prompt]
    shared = {"prompt": prompt, **({"tools": record["tools"]} if record.get("tools") else {})}
    named = zip(("chosen", "rejected"), answers, strict=True)
    made = [document_of({**shared, "completion": x}, f"{where}, {name}", counts) for name, x in named]
    if made[0].kind != made[1].kind or any(x.kind == CHAT and _learned_turns(x.values) != 1 for x in made):
        raise ValueError(
            f"{where}: got answers of several turns of the assistant, or one of messages and one of text, {PAIRS}: "
            "let each be one turn"
        )
    return made


def record_documents(
    record: Any, where: str, counts: Counter[str], kinds: Any = RECORDS[1:], *, pairs: bool = False
) -> list[Document]:
    """The document of a record, by the first of `kinds` (pairs of required and optional keys) whose required keys
    it has, or with `pairs` the two documents of a preference. `counts` counts unread keys; errors name the place
    `where`."""
    return preference_of(record, where, counts) if pairs else [document_of(record, where, counts, kinds)]


def _learned_turns(chat: Chat) -> int:
    return sum(m["role"] == ASSISTANT and w > 0 for m, w in zip(chat.messages, chat.weights, strict=True))


def _spoken(messages: list[Any]) -> list[Any]:
    """Role, text and calls of each of the `messages`, to compare those of two formats."""
    return [
        (x.get("role") or _ROLES.get(str(x.get("from"))), _text_of_message(x), x.get("tool_calls"))
        if isinstance(x, Mapping)
        else x
        for x in messages
    ]


def _text_of_message(message: Any) -> Any:
    return message.get("content", message.get("value")) if isinstance(message, Mapping) else None


def document_of(record: Any, where: str, counts: Counter[str], kinds: Any = RECORDS[1:]) -> Document:
    """The document of a record, by the first of `kinds` (pairs of required and optional keys) whose required keys
    it has. `counts` counts unread keys, and the messages that follow the assistant's last turn, which are left out.

    Raises ValueError, with the place `where`, for a record that is no document.
    """
    if not isinstance(record, dict):
        array = ", or name the file .json" if isinstance(record, list) else ""
        raise ValueError(f"{where}: got {record!r:.60}, {EXPECTED}: write one object a document{array}")
    refuse_preferences(record, where)
    if not (read := read_keys(record, kinds)):
        names = ", ".join(sorted(record)) or "nothing"
        raise ValueError(f"{where}: got an object with {names:.200}, {EXPECTED}: rename its keys")
    counts.update(f"key {name}" for name in record.keys() - set(read))
    values = {name: record[name] for name in read}
    refuse_media(values, (name for name in record.keys() - values.keys() if record[name]), where)
    if read[0] == "prompt" and all(_is_json_of_messages(values[x]) for x in read[:2]):
        values |= {x: json.loads(values[x]) for x in read[:2]}
    if read[0] in (IDS, "text") or (read[0] == "prompt" and not isinstance(values["prompt"], list)):
        values.pop("tools", None)
        return Document(read[0], values, where)
    return Document(CHAT, chat_of(values, where, counts), where)


def chat_of(given: Mapping[str, Any], where: str, counts: Counter[str]) -> Chat:
    """The chat of record values `given`, without messages after the assistant's last turn; `counts` counts them.

    Raises ValueError, with the place `where`, for values that are no chat in any format, or have no turn to learn.
    """
    context: list[Any] = []  # of which nothing is learned
    if "instruction" in given:
        texts: list[Any] = [given["instruction"], *filter(None, [given.get("input")])]
        asked = "\n\n".join(texts) if all(isinstance(x, str) for x in texts) else texts  # texts are refused
        turns = [{"role": "user", "content": asked}, {"role": ASSISTANT, "content": given["output"]}]
    elif "prompt" in given:
        context, turns = (_objects(given[x], where) for x in ("prompt", "completion"))
    else:
        turns = _objects(given.get("messages", given.get("conversations")), where)
    if given.get("system"):
        context = [{"role": "system", "content": given["system"]}]
    every = [_message(m, f"{where}, message {n}") for n, m in enumerate([*context, *turns], 1)]
    ends = [n for n, m in enumerate(every, 1) if m["role"] == ASSISTANT and n > len(context)]
    if not ends:
        raise ValueError(
            f"{where}: got a chat without a turn of the assistant to learn, expected one: add it"
        )
    counts["turns"] += len(every) - ends[-1]
    weights = [m.pop("weight", 1.0) * (n >= len(context)) for n, m in enumerate(every)]
    tools = _objects(_of_json(given.get("tools") or None, where) or [], where, str)
    tools = _objects([_of_json(x, where) for x in tools], where)
    return Chat(tuple(every[: ends[-1]]), where, tools or None, tuple(weights[: ends[-1]]))


def _message(given: Mapping[str, Any], where: str) -> Message:
    """The message `given`, of any format, with OpenAI's keys: role, content, tool calls with arguments parsed."""
    m = {k: x for k, x in given.items() if x is not None}  # no value is no key
    if "from" in m:
        m = {"role": _ROLES.get(str(m.pop("from"))), "content": m.pop("value", None), **m}
    if isinstance(parts := m.get("content"), list):
        texts = [x.get("text") if isinstance(x, Mapping) and x.get("type") == "text" else None for x in parts]
        m["content"] = "".join(map(str, texts)) if all(isinstance(x, str) for x in texts) else parts
    if calls := _objects(m.pop("tool_calls", None) or [], where):  # none are no key: templates ask for either
        m["tool_calls"] = [
            {**x, "function": _call(x["function"], where)} if "function" in x else _call(x, where)
            for x in calls
        ]
    missing = [k for k in ("role", "content") if not isinstance(m.get(k), str)]
    if missing and not (missing == ["content"] and "content" not in m and calls):
        got = given.get("from", m.get("role")) if missing[0] == "role" else m.get("content")
        text = f"one of {', '.join(_ROLES)}" if "from" in given and missing[0] == "role" else "text"
        raise ValueError(
            f"{where}: got {got!r:.60} as {missing[0]}, expected {text}, as in {EXAMPLE}: correct it"
        )
    if m.pop("function_call", None):  # no template writes it
        raise ValueError(
            f"{where}: got a function_call, expected tool_calls, its newer form, which templates read: rewrite it"
        )
    if m.get("weight", 1) not in (0, 1):
        raise ValueError(
            f"{where}: got {m['weight']!r:.60} as weight, expected 0 or 1: correct it, or leave it out"
        )
    return m


def _call(function: Any, where: str) -> dict[str, Any]:
    """Return a tool call of a message with its arguments as an object; OpenAI's format has them as JSON
    text."""
    (function,) = _objects([function], where)
    arguments = _of_json(function.get("arguments") or {}, where)
    if not isinstance(arguments, Mapping):
        raise ValueError(
            f"{where}: got the arguments {arguments!r:.60}, expected a JSON object: correct them"
        )
    return {**function, "arguments": arguments}


def _objects(value: Any, where: str, *other: type) -> list[Any]:
    """`value`, parsed if JSON text, which has to be a list of objects or `other` types; else raises ValueError."""
    value = _of_json(value, where)
    if not isinstance(value, list) or not all(isinstance(x, (Mapping, *other)) for x in value):
        raise ValueError(
            f"{where}: got {value!r:.60}, expected a list of objects, as in {EXAMPLE}: write it so"
        )
    return value


def _is_json_of_messages(value: Any) -> bool:
    """Whether `value`, a prompt or completion, is JSON text of messages; any other JSON counts as plain text."""
    with suppress(ValueError, RecursionError):
        found = json.loads(value) if isinstance(value, str) and value.lstrip()[:1] == "[" else None
        return bool(found) and all(isinstance(x, dict) and "role" in x for x in found)
    return False


def _of_json(value: Any, where: str) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{where}: got {value!r:.60}, expected JSON, or objects ({error}): correct it"
        ) from error
