"""Tokenizers: text to tokens and back, by a local `tokenizer.json`, or as bytes; and chats to text.

Every tokenizer has an end token; all its tokens are below `vocab_size`; and two that would give different tokens
have different digests. transformers is imported when a file is opened: pip install -e ".[hf]".
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate, groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
from attrs import field, frozen

from zfunc.errors import install, refuse
from zfunc.train.data.records import ASSISTANT, Chat, Message

Located = tuple[np.ndarray, np.ndarray]  # int64 tokens [tokens], and the characters of each, [tokens, 2]
CALL = 1 << 20  # characters of a call of the library, which holds about 150 bytes for each
CONFIG = "tokenizer_config.json"  # beside a tokenizer.json
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")
"""What tokenizers call the end of a document, in the order in which they are tried."""

Span = tuple[int, int]  # characters
_TRIED = 1000  # chats that are rendered before a training
_MARKS = re.compile(r"(\{%[-+]?\s*)generation\b")  # in a template, around what the assistant writes
_ENDS = re.compile(r"(\{%[-+]?\s*)endgeneration\b")


@frozen(eq=False)
class Vocabulary:
    """The token ids below `vocab_size`. Data that is already tokenized has a Vocabulary without a Tokenizer.

    >>> Vocabulary("below 50257", 50257).dtype
    dtype('uint16')
    """

    digest: str
    vocab_size: int

    @property
    def dtype(self) -> "np.dtype[Any]":
        """NumPy dtype of stored tokens: 8 bits for bytes as tokens alone, 16 or 32 bits for other
        vocabularies.

        >>> BYTES.dtype
        dtype('uint8')
        """
        return np.dtype("u1" if self is BYTES else "<u2" if self.vocab_size <= 1 << 16 else "<u4")


@frozen(eq=False)
class Tokenizer(Vocabulary):
    """A tokenizer of texts. Token `end` follows every document; `chat` is the chat template, or None.

    `locate(texts)` returns for each text its tokens, int64 [tokens], and their character ranges, [tokens, 2].
    """

    name: str
    end: int
    locate: Callable[[Sequence[str]], list[Located]]
    decode: Callable[[Sequence[int]], str]
    chat: "ChatTemplate | None"
    before: np.ndarray  # tokens that begin every document, and those that end one; int64
    after: np.ndarray

    def document(self, text: np.ndarray) -> tuple[np.ndarray, int]:
        """The token ids `text` of a document between the tokenizer's first and last special tokens, which are
        added only if missing; and the number of tokens added in front."""
        begun = len(self.before) and np.array_equal(text[: len(self.before)], self.before)
        before = self.before[: 0 if begun else None]
        after = self.after[1 if len(self.after) and text[-1:] == self.after[:1] else 0 :]
        return np.concatenate([before, text, after], dtype=text.dtype, casting="unsafe"), len(before)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The tokens of each of `texts`, int64 [tokens]."""
        return [ids for ids, _ in self.locate(texts)]

    @property
    def stops(self) -> frozenset[int]:
        """The tokens that end a document or a turn of a chat: a sample stops after one of them."""
        asked, after = Chat(({"role": "user", "content": "?"}, {"role": ASSISTANT, "content": "_|_"}), ""), ""
        with suppress(ValueError, ImportError):  # a template for other chats
            for text, _ in () if self.chat is None else self.chat.render(asked):
                after = text[text.rindex("_|_") + 3 :].strip()
        return frozenset({self.end, *self.encode([after])[0][:1].tolist()})


def _locate_bytes(texts: Sequence[str]) -> list[Located]:
    every = (np.frombuffer(text.encode(), np.uint8) for text in texts)
    return [(ids, np.zeros((0, 2), np.int64)) for ids in every]  # no chats, so nobody asks where they are


def _decode_bytes(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode("utf-8", errors="replace")


_NONE, _ZERO = np.zeros(0, np.int64), np.zeros(1, np.int64)
BYTES = Tokenizer("bytes", 256, "bytes", 0, _locate_bytes, _decode_bytes, None, _NONE, _ZERO)
"""UTF-8, with zero after a document."""


def open_tokenizer(
    path: Path, *, end: int | None = None, template_args: Mapping[str, Any] | None = None
) -> Tokenizer:
    """The tokenizer of a local `tokenizer.json`, as transformers reads it with the files beside it.

    If a `tokenizer_config.json` beside it names a class, tokens, special tokens and templates are those of
    `AutoTokenizer`; else those of the file itself. The end token is its `eos_token`, else `end`, else the
    first usual one, such as "<|endoftext|>" or "</s>", in its vocabulary. `template_args` are variables of
    the chat template. Raises ValueError for a file that is not a tokenizer or has no end token; ImportError
    without transformers.
    """
    try:
        import tokenizers
        from transformers import AutoTokenizer, PreTrainedTokenizerFast
    except ImportError as error:
        refuse("tokenizer", "one without transformers", "it", install("hf"), ImportError, cause=error)
    try:
        beside = path.with_name(CONFIG)
        config = json.loads(beside.read_text(encoding="utf-8")) if beside.is_file() else {}
        of_class = AutoTokenizer if config.get("tokenizer_class") else PreTrainedTokenizerFast
        given = {} if path.name == "tokenizer.json" else {"tokenizer_file": str(path)}
        loaded: Any = of_class.from_pretrained(path.parent, local_files_only=True, **given)
        library = loaded.backend_tokenizer
        if not isinstance(library, tokenizers.Tokenizer):
            raise TypeError(f"{type(loaded).__name__} has no fast tokenizer")
    except Exception as error:  # the library raises Exception itself
        got = f"{path}, which cannot be read ({error!r:.300})"
        expected = "a tokenizer.json, as save_pretrained writes it"
        refuse("tokenizer", got, expected, "name that file", cause=error)
    library.no_padding()
    library.no_truncation()
    end = _end_token(path, loaded, end)
    chat = None if loaded.chat_template is None else ChatTemplate(loaded, template_args or {})
    counts = (library.to_str(), end, loaded.special_tokens_map, loaded.chat_template, chat and chat.variables)

    def locate(texts: Sequence[str]) -> list[Located]:
        encodings = library.encode_batch(list(texts), add_special_tokens=False)
        return [(np.array(x.ids, np.int64), np.array(x.offsets, np.int64).reshape(-1, 2)) for x in encodings]

    # What the post-processor puts around a text, with the end token after it
    probe = library.encode("a", add_special_tokens=True)
    own = [n for n, added in enumerate(probe.special_tokens_mask) if not added] or [0]
    before, after = probe.ids[: own[0]], probe.ids[own[-1] + 1 :]
    after += [] if after[-1:] == [end] else [end]
    size = max(end, *library.get_vocab(with_added_tokens=True).values()) + 1
    return Tokenizer(
        hashlib.sha256(repr(counts).encode()).hexdigest()[:16],
        size,
        str(path),
        end,
        partial(in_calls, locate),
        library.decode,
        chat,
        np.array(before, np.int64),
        np.array(after, np.int64),
    )


# --- long texts ------------------------------------------------------------------------------------------


def in_calls(locate: Callable[[Sequence[str]], list[Located]], texts: Sequence[str]) -> list[Located]:
    """Call `locate` on `texts` in several calls, each of at most 2^20 characters and one text more.

    This bounds memory, and lets an interrupt through between calls. A text longer than that is cut, if possible
    before a space: tokens beside a cut may differ from the tokens of the whole text.
    """
    parts = [[*_parts(text)] for text in texts]
    each = [part for own in parts for part in own]
    done: list[Located] = []
    for _, call in groupby(zip(each, accumulate(map(len, each)), strict=True), lambda x: x[1] // CALL):
        done += locate([part for part, _ in call])
    rest = iter(done)
    return [_joined(own, [*islice(rest, len(own))]) for own in parts]


def _parts(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > CALL:
        space = text.rfind(" ", start + 1, start + CALL)
        stop = space if space > 0 else start + CALL
        yield text[start:stop]
        start = stop
    yield text[start:]


def _joined(parts: list[str], located: list[Located]) -> Located:
    if len(parts) == 1:
        return located[0]
    starts = accumulate(map(len, parts[:-1]), initial=0)
    moved = [(ids, spans + start) for start, (ids, spans) in zip(starts, located, strict=True)]
    ids, spans = zip(*moved, strict=True)
    return np.concatenate(ids), np.concatenate(spans)


def _end_token(path: Path, loaded: Any, default: int | None) -> int:
    known = (loaded.eos_token_id, default, *map(loaded.backend_tokenizer.token_to_id, END_TOKENS))
    if (end := next((token for token in known if token is not None), None)) is not None:
        return end
    do = "name it as eos_token in a tokenizer_config.json beside it"
    refuse("tokenizer", f"{path} without an end token", "one, to follow every document", do)


# --- chats ------------------------------------------------------------------------------------------------
#
# What is learned of a chat is what the assistant wrote, as the tokenizer's template writes it: from the end of the
# prompt that the model would be given, to the end of the turn. The template is in Jinja, rendered by transformers.


def check_template(folder: Path) -> str | None:
    """The chat template in a tokenizer's folder; None unless there is exactly one. Raises ValueError for a template
    that is not valid Jinja. Needs neither torch nor transformers."""
    from jinja2 import Environment, TemplateSyntaxError

    path, text = folder / "chat_template.jinja", None
    with suppress(ValueError):  # no UTF-8 or no JSON: `open_tokenizer` tells it
        if path.is_file():
            text = path.read_text(encoding="utf-8")
        elif (path := folder / CONFIG).is_file():
            config = json.loads(path.read_text(encoding="utf-8"))
            text = config.get("chat_template") if isinstance(config, dict) else None
    if not isinstance(text, str):
        return None
    plain = _ENDS.sub(r"\1endif", _MARKS.sub(r"\1if true", text))  # those two are transformers' own
    try:
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain)
    except TemplateSyntaxError as error:
        got = f"{path} with a chat template that is no Jinja (line {error.lineno}: {error.message})"
        refuse("tokenizer", got, "it whole", "correct it, or copy it again", cause=error)
    return text


def check_chats(template: str, chats: Sequence[Chat], variables: Mapping[str, Any]) -> None:
    """Raise ValueError if `template`, with `variables`, refuses one of the first of `chats`, or the last one."""
    from jinja2 import TemplateError

    for chat in (*chats[:_TRIED], *chats[-1:]):
        try:
            _rendered(template, chat, chat.messages, variables)
        except ImportError:  # of transformers, which `open_tokenizer` names
            return
        except ValueError as error:
            if type(error.__cause__) is TemplateError:  # its own; of special tokens nothing is known here
                raise


@frozen(eq=False)
class ChatTemplate:
    """The chat templates of a transformers `tokenizer`, and further `variables` of the templates."""

    tokenizer: Any
    variables: Mapping[str, Any] = field(factory=dict[str, Any])

    def render(self, chat: Chat) -> Iterator[tuple[str, list[Span]]]:
        """Texts of a chat, each with the ascending character ranges that are learned: one text, or one for each
        turn of the assistant where the template writes earlier turns unlike the last (Qwen 3's template leaves the
        thoughts out of earlier turns).

        The learned range of a turn begins at the end of the prompt that the model would be given, or where the turn
        first differs from that prompt (as where a prompt opens a thought). The range ends with the turn, or with a
        special token that ends the turn. Raises ValueError, with the record, for a chat that the template refuses.
        """
        learns = [*chat.weights] or [1.0] * len(chat.messages)
        turns = [n for n, m in enumerate(chat.messages) if m["role"] == ASSISTANT]
        text, marked = self._text(chat, len(learns), marks=True)
        if marked and len(marked) == len(turns):
            yield text, [x for n, x in zip(turns, marked, strict=True) if learns[n]]
            return
        special = tuple(str(x) for x in self.tokenizer.added_tokens_decoder.values() if x.special)
        spans: dict[str, list[Span]] = {}  # by the text that they are in
        for n in turns:
            prompt, until = self._text(chat, n, prompt=True)[0], self._text(chat, n + 1)[0]
            start = _shared(prompt, until)
            if start < len(prompt) and start < _shared(prompt, self._text(chat, n)[0]):
                raise ValueError(
                    f"{chat.where}: got a chat template that writes turn {n + 1} otherwise than it asks for it, "
                    "expected its generation prompt to begin the turn: use another template, or mark what the "
                    "assistant writes in it by {% generation %}"
                )
            if learns[n]:
                whole = text if text.startswith(until) else until
                ended = until.rstrip()
                stop = len(ended if ended.endswith(special) else until)
                spans.setdefault(whole, []).append((start, stop))
        yield from (spans or {text: []}).items()

    def _text(
        self, chat: Chat, count: int, *, prompt: bool = False, marks: bool = False
    ) -> tuple[str, list[Span]]:
        """The first `count` messages of `chat` as text, with the generation prompt if `prompt`; and, if `marks`,
        the character ranges that the template itself marks as written by the assistant."""
        try:
            source = self.tokenizer.get_chat_template(tools=chat.tools)
        except ValueError as error:
            raise ValueError(
                f"{chat.where}: got a chat for a tokenizer with the chat templates "
                f"{', '.join(self.tokenizer.chat_template)}, expected one called default: rename the one to use"
            ) from error
        how = {"return_assistant_tokens_mask": marks and _MARKS.search(source) is not None}
        variables = {**self.tokenizer.special_tokens_map, **self.variables}
        return _rendered(source, chat, chat.messages[:count], variables, add_generation_prompt=prompt, **how)


def _rendered(
    source: str, chat: Chat, messages: Sequence[Message], variables: Mapping[str, Any], **how: bool
) -> tuple[str, list[Span]]:
    """The text of `messages` of `chat` by template `source`, options `how`; ranges marked as the assistant's."""
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [*messages]
    if "developer" not in source:  # the newer name of a role that every template knows
        messages = [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
    try:
        texts, marked = render_jinja_template(
            [messages], tools=chat.tools, chat_template=source, **how, **variables
        )
    except Exception as error:  # Jinja's own, and whatever a template can do wrong
        raise ValueError(
            f"{chat.where}: got a chat that the chat template refuses ({error}), expected its roles in its "
            "order: change the chat, or the template"
        ) from error
    return texts[0], [(start, end) for one in marked for start, end in one]


def _shared(a: str, b: str) -> int:
    """The number of characters at the beginning of `a` and `b` that are the same in both."""
    if b.startswith(a):
        return len(a)
    return next((n for n, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), len(b))
