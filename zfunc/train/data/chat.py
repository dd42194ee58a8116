"""Chats: the text that a tokenizer's chat template makes of them, and which of its characters are learned.

What is learned is what the assistant wrote, as the template writes it: from the end of the prompt that the model
would be given, to the end of the turn. The template is the tokenizer's own, in Jinja, rendered by transformers.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from attrs import field, frozen

Message = dict[str, Any]  # "role", "content", and what else the template reads
Span = tuple[int, int]  # characters
ASSISTANT = "assistant"
EXAMPLE = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
_MARKS = re.compile(r"\{%[-+]?\s*generation\b")  # in a template, around what the assistant writes


@frozen
class Chat:
    """The messages of a record, which is `where`. A turn of the assistant with a weight of 0 is not learned."""

    messages: tuple[Message, ...]
    where: str
    tools: list[Any] | None = None
    weights: tuple[float, ...] = ()  # of the messages; () is 1 for each


@frozen
class ChatTemplate:
    """A tokenizer's template of chats: a Jinja `source`, with special tokens as its variables."""

    source: str
    variables: Mapping[str, str] = field(factory=dict[str, str])

    def render(self, chat: Chat) -> Iterator[tuple[str, list[Span]]]:
        """Texts of a chat, each with the ranges of its characters that are learned, in ascending order. It is one
        text, or one for each turn of the assistant where the template writes earlier turns otherwise than the last
        (as Qwen 3's, which drops their thoughts).

        Raises ValueError, with the record, for a chat that the template refuses.
        """
        learns = [*chat.weights] or [1.0] * len(chat.messages)
        turns = [n for n, m in enumerate(chat.messages) if m["role"] == ASSISTANT]
        text, marked = self._text(chat, len(learns), marks=_MARKS.search(self.source) is not None)
        if marked and len(marked) == len(turns):
            yield text, [x for n, x in zip(turns, marked, strict=True) if learns[n]]
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
        yield from (spans or {text: []}).items()

    def _text(
        self, chat: Chat, count: int, *, prompt: bool = False, marks: bool = False
    ) -> tuple[str, list[Span]]:
        """The first `count` messages as text, with the beginning of the assistant's turn after a `prompt`; and the
        ranges that the template itself marks as the assistant's.
        """
        try:
            from transformers.utils.chat_template_utils import render_jinja_template
        except ImportError as error:
            raise ImportError("data: a chat template needs transformers: pip install 'zfunc[hf]'") from error
        try:
            texts, marked = render_jinja_template(
                [[*chat.messages[:count]]],
                tools=chat.tools,
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


def chat_of(record: Mapping[str, Any], where: str) -> Chat:
    """The chat of a record with `messages` and perhaps `tools`, as OpenAI's.

    Raises ValueError, with the record, for messages without a role or content, and for a last turn that is not the
    assistant's.
    """
    given = record["messages"]
    if not isinstance(given, list) or not all(isinstance(x, Mapping) for x in given):
        raise ValueError(
            f"{where}: got {given!r:.60}, expected a list of objects, as in {EXAMPLE}: write it so"
        )
    messages = [{k: x for k, x in m.items() if x is not None} for m in given]  # Arrow has None for no key
    for n, m in enumerate(messages, 1):
        missing = [k for k in ("role", "content") if not isinstance(m.get(k), str)]
        if missing and not (missing == ["content"] and "content" not in m and "tool_calls" in m):
            got = m.get(missing[0])
            raise ValueError(
                f"{where}, message {n}: got {got!r:.60} as {missing[0]}, expected text, as in {EXAMPLE}: correct it"
            )
    last = messages[-1]["role"] if messages else None
    if last != ASSISTANT:
        raise ValueError(
            f"{where}: got a chat whose last turn is of the role {last!r}, expected the assistant's, because its "
            "turns are learned: add it, or leave out what is after the last one"
        )
    weights = tuple(m.pop("weight", 1.0) for m in messages)
    return Chat(tuple(messages), where, record.get("tools"), weights)
