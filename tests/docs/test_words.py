"""The pages in reading order: a word is used where it has been said, or beside a link to where it is."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
GLOSSARY = (DOCS / "glossary.md").read_text()
ENTRY = re.compile(r"^- \[(.+?)\]\(([^)#]+)#([^)]+)\): (.+)$", re.M)
WORDS: dict[str, tuple[Path, str]] = {  # of each the page and the heading that introduce it
    word: ((DOCS / page).resolve(), heading) for word, page, heading, _ in ENTRY.findall(GLOSSARY)
}
INDEX = re.findall(r"^\| \[.+?\]\(([^)]+\.md)\)", (DOCS / "README.md").read_text(), re.M)
ORDER = [x for x in ("../README.md", *INDEX) if not x.startswith("../course") and x != "glossary.md"]
FENCED = re.compile(r"^```.*?^```$", re.M | re.S)


def prose(text: str) -> str:
    """Without code, pictures, the targets of links and what marks emphasis."""
    text = re.sub(r"^    .*?$|<!--.*?-->", "", FENCED.sub("", text), flags=re.M | re.S)
    return re.sub(r"`[^`]*`|!\[[^]]*\]\([^)]*\)|(?<=\])\([^)]*\)|\*", "", text)


def is_used(word: str, text: str) -> bool:
    """Whether prose has the word: any case, singular or plural, over the end of a line, too."""
    pattern = r"[-\s]+".join(re.split("[- ]", word))
    return re.search(rf"\b{pattern}(s|es)?\b", prose(text), re.I) is not None


def leads_to(text: str, page: Path, target: Path, heading: str) -> bool:
    """Whether a link of some text of a page leads to that heading of another page; the first may be left out."""
    links = re.findall(r"\]\(([^)#\s]+)#?([^)\s]*)\)", text)
    (first, *_) = sections(target)
    return any((page.parent / to).resolve() == target and (at or first) == heading for to, at in links)


def sections(page: Path) -> dict[str, str]:
    """Each heading with the text below, up to the next heading, by its anchor."""
    parts = re.split(r"^#+ (.+)$", FENCED.sub("", page.read_text()), flags=re.M)
    anchors = (re.sub(r"[^\w\- ]", "", x.lower()).replace(" ", "-") for x in parts[1::2])
    return dict(zip(anchors, map(" ".join, zip(parts[1::2], parts[2::2], strict=True)), strict=True))


def unsaid(page: Path, earlier: list[Path]) -> list[str]:
    """Words of a page that no earlier page introduces, nor the page, nor a link up to their first paragraph."""
    found: list[str] = []
    paragraphs = FENCED.sub("", page.read_text()).split("\n\n")
    for word, (target, heading) in WORDS.items():
        uses = [n for n, paragraph in enumerate(paragraphs, 1) if is_used(word, paragraph)]
        if uses and target not in (*earlier, page):
            found += [] if leads_to("\n".join(paragraphs[: uses[0]]), page, target, heading) else [word]
    return found


def test_a_glossary_is_short_sorted_and_each_entry_is_a_sentence_with_a_link() -> None:
    entries = ENTRY.findall(GLOSSARY)
    assert len(entries) == GLOSSARY.count("\n- ") == len(WORDS) <= 40
    assert list(WORDS) == sorted(WORDS)
    for *_, sentence in entries:
        assert re.fullmatch(r"[a-z][^.]*\.", sentence), sentence
        assert not re.match(r"(it|this|that|they)\b", sentence), sentence


@pytest.mark.parametrize("word", WORDS)
def test_a_word_is_said_where_the_glossary_leads(word: str) -> None:
    page, heading = WORDS[word]
    assert heading in sections(page), f"no heading #{heading} in {page.name}"
    assert is_used(word, sections(page)[heading]), f"{page.name}#{heading} does not say {word!r}"


@pytest.mark.parametrize("name", ORDER)
def test_no_word_is_used_before_it_is_said(name: str) -> None:
    pages = [(DOCS / x).resolve() for x in ORDER]
    at = ORDER.index(name)
    assert unsaid(pages[at], pages[:at]) == [], "say them earlier, or link to where glossary.md says they are"


def test_a_word_out_of_order_is_found(tmp_path: Path) -> None:
    page, bucket = tmp_path / "page.md", DOCS / "one_bucket.md"
    for text, found in (
        ("`Bucket 2` is copied.", []),
        (f"A bucket\n\nof [many]({bucket}#8-back-to-the-device)", ["Bucket"]),
        (f"[Buckets]({bucket}) and\nmicro-\nbatches", ["Micro-batch"]),
        ("vertical\norders", ["Vertical order"]),
    ):
        page.write_text(text)
        assert unsaid(page, []) == found, text
