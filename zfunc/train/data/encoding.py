"""Documents as tokens, and which tokens are learned."""

from collections.abc import Iterable, Iterator
from itertools import groupby, islice
from typing import Any

import numpy as np

from zfunc.errors import refuse
from zfunc.models.loss_pieces import IGNORE_INDEX
from zfunc.train.data.records import CHAT, IDS, LABELS, MASK, Document
from zfunc.train.data.tokenizer import BYTES, Tokenizer, Vocabulary

_DOCUMENTS = 64  # tokenized in one call
_LONG = 1 << 20  # characters of a document after which no more are read in one call
Encoded = tuple[
    np.ndarray, np.ndarray | None
]  # tokens of a document, and which are learned; None: all of them


def encoded_documents(
    documents: Iterable[Document], vocabulary: Vocabulary, *, whole: bool = False
) -> Iterator[tuple[str, Encoded]]:
    """Yield the kind and the tokens of each document, without those of no tokens. Documents of one kind are
    tokenized together.

    With `whole`, for documents that come in pairs, raises ValueError for a document of no tokens.
    """
    rest = iter(documents)
    while some := list(_some(rest)):
        for kind, group in groupby(some, lambda x: x.kind):
            group = list(group)
            for encoded in _TOKENS_OF[kind](group, vocabulary):
                if len(encoded[0]):
                    yield kind, encoded
                elif whole:
                    raise ValueError(
                        f"{group[0].where}: got a preference of no tokens there, or soon after it, expected a "
                        "prompt and answers that the tokenizer knows: correct it"
                    )


def _some(documents: Iterator[Document]) -> Iterator[Document]:
    for document in islice(documents, _DOCUMENTS):
        yield document
        text = document.values["text"] if document.kind == "text" else document.values
        if isinstance(text, str | bytes) and len(text) > _LONG:
            break


def _bytes(documents: list[Document], _: Vocabulary) -> Iterator[Encoded]:
    yield from ((np.frombuffer(x.values, np.uint8), None) for x in documents)


def _tokens(documents: list[Document], vocabulary: Vocabulary) -> Iterator[Encoded]:
    """Tokens of each tokenized document without padding, and a mask: false where its labels exclude the loss."""
    for document in documents:
        columns, where = document.values, document.where
        for name, value in columns.items():
            if not isinstance(value, list) or any(type(x) is not int for x in value):
                raise ValueError(
                    f"{where}: got {name} {value!r:.60}, expected a list of whole numbers: tokenize it again"
                )
            if len(value) != (length := len(columns[IDS])):
                raise ValueError(f"{where}: got {len(value)} {name} for {length} {IDS}, expected as many")
        ids, labels = (np.array(columns.get(x, columns[IDS]), np.int64) for x in (IDS, LABELS))
        kept = np.array(columns[MASK], bool) if MASK in columns else slice(None)
        learned = labels != IGNORE_INDEX
        if (bad := np.flatnonzero(learned & (labels != ids))).size:
            raise ValueError(
                f"{where}: got the label {labels[bad[0]]} for the token {ids[bad[0]]}, expected the token itself, "
                f"or {IGNORE_INDEX} where no loss counts: do not shift labels"
            )
        ids = ids[kept]
        if len(ids) and not 0 <= ids.min() <= ids.max() < vocabulary.vocab_size:
            got = f"tokens from {ids.min()} to {ids.max()}"
            expected = f"0 or above and below {vocabulary.vocab_size}"
            refuse(where, got, expected, "pass the `vocab_size` of their tokenizer")
        yield ids, learned[kept]


def _texts(documents: list[Document], tokenizer: Tokenizer) -> Iterator[Encoded]:
    for document in documents:
        for name, value in document.values.items():
            if not isinstance(value, str):
                mixed = name != "text" and isinstance(value, list)
                do = "write both of the pair as texts or as messages" if mixed else "write it as one"
                do = "write a text, or leave the record out" if value is None else do
                raise ValueError(f"{document.where}, {name!r}: got {value!r:.60}, expected a string: {do}")
    pairs = [("", *x.values.values())[-2:] for x in documents]  # a prompt, or none, and what follows it
    pairs = [pair for pair in pairs if any(pair)]
    located = tokenizer.locate([prompt + text for prompt, text in pairs])
    for (prompt, text), (ids, places) in zip(pairs, located, strict=True):
        asked = int(np.searchsorted(places[:, 0], len(prompt)))
        if prompt and (not asked or places[asked - 1, 1] > len(prompt)):  # a token of both, or bytes
            before, after = tokenizer.encode([prompt, text])
            ids, asked = np.concatenate([before, after]), len(before)
        tokens, begun = tokenizer.document(ids)
        asked = begun + asked if documents[0].kind == "prompt" else 0
        learned = np.ones(len(tokens), bool)
        learned[:asked] = False
        yield tokens, learned


def _chats(documents: list[Document], tokenizer: Tokenizer) -> Iterator[Encoded]:
    chats = [x.values for x in documents]
    if (template := tokenizer.chat) is None:
        do = "write a chat_template.jinja beside it, or prompt and completion instead of messages"
        if tokenizer is BYTES:
            do = "name the folder of a model that has one with `hf`, or with `tokenizer`"
        got = f"a chat for {tokenizer.name}, without a chat template"
        refuse(chats[0].where, got, "a tokenizer with one", do, ValueError)
    rendered = [x for chat in chats for x in template.render(chat)]
    located = tokenizer.locate([text for text, _ in rendered])
    for (_, spans), (tokens, places) in zip(rendered, located, strict=True):
        learned = np.zeros(len(tokens), bool)
        for first, last in spans:  # a token may begin with a space of the prompt
            learned |= (places[:, 1] > first) & (places[:, 0] < last)
        yield tokens, learned


_TOKENS_OF: dict[str, Any] = {
    **{"bytes": _bytes, IDS: _tokens, CHAT: _chats, "prompt": _texts, "text": _texts}
}
