"""Chats as text: records of messages, the tokenizer's chat template, and which characters of it are learned.

What is learned is what the assistant wrote, as the template writes it: from the end of the prompt that the model
would be given, to the end of the turn. The template is the tokenizer's own, in Jinja, rendered by transformers; a
tokenizer without one gets `plain_chat`.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from attrs import field, frozen

Message = dict[str, Any]  # "role", "content", and what else the template reads
Span = tuple[int, int]  # characters
ASSISTANT = "assistant"
ROLES = {  # of ShareGPT's "from", each as templates call it
    **{"system": "system", "human": "user", "user": "user"},
    **dict.fromkeys(("gpt", "chatgpt", "bard", "bing", "model", ASSISTANT), ASSISTANT),
    **dict.fromkeys(("tool", "function_response", "observation"), "tool"),
}
_MARKS = re.compile(r"\{%[-+]?\s*generation\b")  # in a template, around what the assistant writes
_OPENAI = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
_SHAREGPT = '{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}'


@frozen
class Chat:
    """The messages of a record, which is `where`. A turn of the assistant with a weight of 0 is not learned."""

    messages: tuple[Message, ...]
    where: str
    tools: tuple[Any, ...] | None = None
    weights: tuple[float, ...] = ()


@frozen
class RenderedChat:
    """The text of a chat, and the ranges of its characters that are learned, in ascending order."""

    text: str
    learned: tuple[Span, ...]


@frozen
class ChatTemplate:
    """How a tokenizer writes chats: a Jinja `source`, with special tokens such as `bos_token` as its variables.

    Without a source it is `plain_chat`, with the text of the `end` token after each turn of the assistant.
    """

    source: str = ""
    variables: Mapping[str, str] = field(factory=dict[str, str])
    end: str = ""

    def render(self, chat: Chat) -> Iterator[RenderedChat]:
        """A chat as documents: one, or one for each turn of the assistant where the template writes earlier turns
        otherwise than the last (as Qwen 3's, which drops their thoughts).

        Raises ValueError, with the record, for a chat that the template refuses.
        """
        learns = [*chat.weights] or [1.0] * len(chat.messages)
        turns = [n for n, m in enumerate(chat.messages) if m["role"] == ASSISTANT]
        text, marked = self._text(chat, len(learns), marks=_MARKS.search(self.source) is not None)
        if marked and len(marked) == len(turns):
            yield RenderedChat(text, tuple(x for n, x in zip(turns, marked, strict=True) if learns[n]))
            return
        spans: dict[str, list[Span]] = {}  # by the text that they are in
        for n in turns:
            prompt, until = self._text(chat, n, prompt=True)[0], self._text(chat, n + 1)[0]
            if not until.startswith(prompt):
                raise ValueError(
                    f"{chat.where}: got a chat template that writes turn {n + 1} otherwise than it asks for it, "
                    "expected its generation prompt to begin the turn: use another template, or mark what the "
                    "assistant writes in it by {% generation %}"
                )
            if learns[n]:
                whole = text if text.startswith(until) else until
                spans.setdefault(whole, []).append((len(prompt), len(until)))
        for whole, learned in (spans or {text: []}).items():
            yield RenderedChat(whole, tuple(learned))

    def _text(
        self, chat: Chat, count: int, *, prompt: bool = False, marks: bool = False
    ) -> tuple[str, list[Span]]:
        """The first `count` messages as text, with the beginning of the assistant's turn after a `prompt`; and the
        ranges that the template itself marks as the assistant's.
        """
        messages = [*chat.messages[:count]]
        if not self.source:
            return plain_chat(messages, self.end, prompt=prompt), []
        try:
            from transformers.utils.chat_template_utils import render_jinja_template
        except ImportError as error:
            raise ImportError("data: a chat template needs transformers: pip install 'zfunc[hf]'") from error
        try:
            texts, marked = render_jinja_template(
                [messages],
                tools=None if chat.tools is None else [*chat.tools],
                chat_template=self.source,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=prompt,
                **self.variables,
            )
        except Exception as error:  # Jinja's own, and whatever a template can do wrong
            raise ValueError(
                f"{chat.where}: got a chat that the chat template refuses ({error}), expected its roles in its "
                "order: change the chat, or the template"
            ) from error
        return texts[0], [(start, end) for one in marked for start, end in one]


def plain_chat(messages: list[Message], end: str, *, prompt: bool = False) -> str:
    """A chat for a tokenizer without a template; after a `prompt` it is the assistant's turn.

    >>> hello = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi!"}]
    >>> plain_chat(hello, "</s>"), plain_chat(hello[:1], "</s>", prompt=True)
    ('User: Hello\\n\\nAssistant: Hi!</s>', 'User: Hello\\n\\nAssistant:')
    """
    texts = [(m["role"], m.get("content", "")) for m in messages]
    parts = [f"{role.capitalize()}: {text}{end * (role == ASSISTANT)}" for role, text in texts]
    return "\n\n".join([*parts, *(["Assistant:"] if prompt else [])])


# --- records ----------------------------------------------------------------------------------------------


def chat_of(record: Mapping[str, Any], where: str) -> Chat:
    """The chat of a record with `messages` (OpenAI), `conversations` (ShareGPT), or `instruction` and `output`
    (Alpaca).

    Raises ValueError, with the record, for messages without a role or content, and for a last turn that is not the
    assistant's.
    """
    if "messages" in record:
        # A column of Arrow has None for no key.
        given = [
            {k: x for k, x in m.items() if x is not None}
            for m in _objects(record["messages"], where, _OPENAI)
        ]
    elif "conversations" in record:
        turns = _objects(record["conversations"], where, _SHAREGPT)
        given = [{"role": ROLES.get(m.get("from")), "content": m.get("value")} for m in turns]
    else:
        asked = [x for x in (record["instruction"], record.get("input")) if x]
        user = "\n\n".join(_text(x, where) for x in asked)
        given = [{"role": "user", "content": user}, {"role": ASSISTANT, "content": record["output"] or ""}]
    if (system := record.get("system")) and "messages" not in record:
        given = [{"role": "system", "content": system}, *given]
    messages = tuple(_message(m, f"{where}, message {n}") for n, m in enumerate(given, 1))
    if not messages or messages[-1]["role"] != ASSISTANT:
        got = f"whose last turn is of the role {messages[-1]['role']!r}" if messages else "without a message"
        raise ValueError(
            f"{where}: got a chat {got}, expected the assistant's, because its turns are learned: add it, or leave "
            "out what is after the last one"
        )
    tools = record.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise ValueError(
            f"{where}, 'tools': got {type(tools).__name__}, expected a list of JSON schemas: pass one"
        )
    weights = tuple(m.pop("weight", 1.0) for m in messages)
    return Chat(messages, where, None if tools is None else tuple(tools), weights)


def _message(given: Message, at: str) -> Message:
    if not isinstance(given.get("role"), str):
        raise ValueError(
            f"{at}: got no known role, expected {_OPENAI}, or in 'from' one of {', '.join(ROLES)}: correct it"
        )
    if "tool_calls" in given and "content" not in given:
        return given
    return {**given, "content": _text(given.get("content"), at)}


def _objects(value: Any, where: str, show: str) -> list[Mapping[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(x, Mapping) for x in value):
        raise ValueError(f"{where}: got {value!r:.60}, expected a list of objects, as in {show}: write it so")
    return value


def _text(value: Any, where: str) -> str:
    """A text, or one in parts. Raises ValueError for anything else, such as an image."""
    if isinstance(value, list):
        parts = [x.get("text") if isinstance(x, Mapping) and x.get("type") == "text" else None for x in value]
        value = "".join(parts) if all(isinstance(x, str) for x in parts) else value
    if not isinstance(value, str):
        raise ValueError(f"{where}: got {value!r:.60}, expected text: leave other records out")
    return value
