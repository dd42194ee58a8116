"""README.md and docs/: their Python runs, their links lead somewhere, their tables have what the code has."""

import argparse
import gzip
import importlib
import inspect
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from attrs import fields
from pairs import in_pairs
from small_trainings import TEXT, TINY
from test_blocks import block, in_order
from text_data import save_tokenizer, write_jsonl
from trained import compiled, steps

import zfunc
from zfunc import errors, schedules
from zfunc.cli.catalogue import COMMANDS
from zfunc.cli.main import _parse as parse
from zfunc.cli.main import _settings as settings_of
from zfunc.cli.main import main
from zfunc.engine.stages.stages import STAGES
from zfunc.runtime.accelerator import Vendor

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "docs"))

from make_tables import TABLES, with_tables  # noqa: E402

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
PRINTED = {
    "README.md": r"^loss 0\.\d+\nlane copies\n[^|]*^lane compute$[^|]*^same bits: True\n(True|False) [\d.e-]+ s ",
    "design.md": r"^Signum 1\none_bus 1\n\['halve\[0,0,0\]'\]$",
    "quickstart.md": r"^$",
    "optimizers.md": r"^\d+ buckets\nlr 0.01\nstep 2 True$",
    "checkpoints.md": r"^resumes after step 10$",
    "finetuning.md": r"^goes on after step 50$",
    "any_model.md": r"^\['first', 'blocks.0', 'blocks.1', .*'blocks.7', 'last'\]$",
    "recipes.md": r"^\['body.bias', 'body.weight', 'loss.bias', 'loss.weight'\] True$",
}  # the Python of these pages continues that of the README


def python(page: Path) -> str:
    """The Python of a page, from top to bottom."""
    return "\n".join(re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S))


@pytest.fixture(scope="module")
def readme() -> dict[str, Any]:
    """The names that the README's Python defines, before it runs."""
    return {"__name__": "page"}


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    headings = (re.sub(r"[^\w\- ]", "", h.lower()) for h in re.findall(r"^#+ (.+)$", prose, re.M))
    return {heading.replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", PRINTED)
def test_the_python_of_a_page_runs(
    name: str,
    readme: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    page = README if name == README.name else ROOT / "docs" / name
    exec(compile(python(page), name, "exec"), readme)
    printed, complaints = capsys.readouterr()
    assert re.search(PRINTED[name], printed, re.M), printed
    if page == README:
        assert in_order(block(page.name, "lane copies"), printed.splitlines()) == []
    assert not complaints


def test_no_python_of_a_page_is_left_out() -> None:
    elsewhere = {"deepspeed.md", "one_bucket.md", "one_hour.md", "tutorial.md"}  # run by tests of their own
    assert {page.name for page in PAGES if python(page)} == {*PRINTED, *elsewhere}


def commands(pages: Sequence[Path] = PAGES) -> list[list[str]]:
    """The words after `zfunc` of every command of some pages, without torchrun before them."""
    found: list[list[str]] = []
    for page in pages:
        blocks = re.findall(r"^```(?:sh|bash)\n(.*?)^```$", page.read_text(), re.M | re.S)
        for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            start = next((n for n, x in enumerate(words) if x == "zfunc"), len(words))
            if (start == 0 or words[start - 1 : start] == ["-m"]) and words[start + 1 :]:
                found.append(words[start + 1 :])
    return found


def test_every_command_of_a_page_is_one_that_zfunc_takes() -> None:
    """As far as its options and their values go, together: the folders and GPUs that it names are elsewhere."""
    assert len(commands()) > 40
    for words in commands():
        parse(words, args := argparse.Namespace(prog="zfunc"))
        if "config" not in args and "trainer_args" not in args:
            settings_of(COMMANDS[args.command], args)


SMALL = {"--seq-length": "32", "--tiles": "4", "--save-every": "1"}  # instead of a page's numbers
ELSEWHERE = {"tutorial.md"}  # run by a test of its own
# What names a checkpoint of another system or a model with experts, with which other tests run such commands.
OF_OTHERS = {"out/checkpoint-500", "--lora-target-parameters"}
TAKEN = ["--resume", "taken"]  # from a run made of that checkpoint


def readers_files(folder: Path) -> None:
    """The files and folders of the reader's that pages name, and a tiny model."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(num_attention_heads=2, num_key_value_heads=1, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "model")
    words = ["<unk>", "</s>", "user", "assistant", *(f"w{n}" for n in range(40))]
    save_tokenizer(folder / "model" / "tokenizer.json", words)
    (folder / "model" / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }} {{ m.content }} </s> {% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    )
    shutil.copy(folder / "model" / "config.json", folder)
    texts = [" ".join(f"w{(n + k) % 40}" for k in range(9)) for n in range(200)]
    turns = [[{"role": "user", "content": x}, {"role": "assistant", "content": x}] for x in texts]
    write_jsonl(folder / "texts.jsonl", *({"text": x} for x in texts))
    write_jsonl(folder / "pairs.jsonl", *({"prompt": x, "completion": x} for x in texts))
    write_jsonl(folder / "chats.jsonl", *({"messages": x} for x in turns))
    write_jsonl(folder / "held_out.jsonl", *({"text": x} for x in texts))
    write_jsonl(folder / "prefs.jsonl", *({"prompt": x, "chosen": x, "rejected": "w1 w2"} for x in texts))
    (folder / "shards").mkdir()
    (folder / "shards" / "0.jsonl.gz").write_bytes(gzip.compress((folder / "texts.jsonl").read_bytes()))
    (folder / "book.txt").write_text(" ".join(texts))
    (folder / "data.txt").write_text(TEXT)
    (folder / "ds_config.json").write_text('{"train_batch_size": 4, "zero_optimization": {"stage": 2}}')
    trainer = '{"output_dir": "run", "max_length": 32, "optim": "adamw_8bit", "warmup_steps": 0.03}'
    (folder / "args.json").write_text(trainer)


def small(words: list[str], number: int, folder: Path) -> list[str]:
    """Command `number` of a page in a size for here, in a folder for what it names outside of it."""
    words = [SMALL.get(before, x) for before, x in zip(["", *words], words, strict=False)]
    words = [x.replace("/mnt/", f"{folder}/mnt/") for x in words]
    words = [x for x in words if x not in TAKEN] if {*TAKEN} <= {*words} else words
    if words[0] == "train":
        words += [] if "--hf" in words else TINY
        words += [] if {"--data", "--hf"} & {*words} else ["--data", "data.txt"]
        words += (
            [] if "--epochs" in words else ["--steps", str(number + 2)]
        )  # where another ended one goes on
    return words


@pytest.mark.parametrize(
    "page", [pytest.param(x, marks=pytest.mark.slow, id=x.name) for x in PAGES if x.name not in ELSEWHERE]
)
def test_every_command_of_a_page_runs(page: Path, own_folder: Path) -> None:
    """In order, in one folder, in small sizes and one process. A plan that does not fit, or what is wrong with a
    machine, ends with 1."""
    readers_files(own_folder)
    for number, words in enumerate(x for x in commands([page]) if not OF_OTHERS & {*x}):
        words = small(words, number, own_folder)
        for name, place in pairwise(words):
            if name in ("--swap", "--folder"):
                Path(place).mkdir(parents=True, exist_ok=True)
            if name == "--out" and words[0] == "export" and Path(place).is_dir():
                shutil.rmtree(place)  # of an earlier section
        assert main(words) in ((0, 1) if words[0] in ("plan", "draw", "doctor") else (0,)), words


def test_every_name_of_a_page_is_there() -> None:
    """Dotted names in code, as a person would import them: `zfunc.hf.load`, `zfunc.core.graph`."""
    for page in PAGES:
        code = " ".join(re.findall(r"`[^`]+`", page.read_text()))
        for name in {*re.findall(r"\bzfunc(?:\.[A-Za-z_]\w*)+", code)} - {"zfunc.NAME"}:
            value: Any = zfunc
            for part in name.split(".")[1:]:
                value = getattr(value, part, None) or importlib.import_module(f"{value.__name__}.{part}")


def test_the_page_of_devices_has_every_call_of_a_vendor() -> None:
    text = (ROOT / "docs" / "devices.md").read_text()
    assert [f.name for f in fields(Vendor) if f"| `{f.name}` |" not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name if page != README else "top")
def test_links_and_pictures_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
        if "://" not in target:
            to = page.parent / target if target else page
            assert to.exists(), f"{page.name} links to {target}"
            assert not anchor or anchor in anchors(to), f"{page.name} links to {target}#{anchor}"


def test_the_index_has_every_page_and_every_picture_is_shown() -> None:
    text = "".join(page.read_text() for page in PAGES)
    index = (ROOT / "docs" / "README.md").read_text()
    assert [p.name for p in PAGES[1:] if p.name != "README.md" and f"]({p.name})" not in index] == []
    assert [p.name for p in (ROOT / "docs").glob("*.svg") if f"{p.name})" not in text] == []


def test_the_readme_is_short_and_begins_with_code() -> None:
    """At most 650 words beside code, and 150 before the first."""
    before, *rest = re.split(r"^```.*?^```$", README.read_text(), flags=re.M | re.S)
    assert len(before.split()) <= 150
    assert len(" ".join([before, *rest]).split()) <= 650


def test_the_design_names_every_package() -> None:
    packages = {path.parent.name for path in (ROOT / "zfunc").glob("*/__init__.py")}
    text = (ROOT / "docs" / "design.md").read_text()
    assert set(re.findall(r"^zfunc/(\w+)/ ", text, re.M)) == packages


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_those_of_the_code(name: str) -> None:
    assert (ROOT / "docs" / name).read_text() == with_tables(name), "run python docs/make_tables.py"


def test_settings_are_those_of_compile() -> None:
    text = (ROOT / "docs" / "settings.md").read_text()
    table = dict(re.findall(r"^\| `(\w+)` \| `(.+?)` \|", text, re.M))
    parameters = [*inspect.signature(zfunc.compile).parameters.values()][1:]
    assert set(table) == {p.name for p in parameters}
    for p in parameters:
        assert table[p.name].replace("_", "") == repr(p.default).replace("'", '"'), p.name


def test_errors_are_those_of_the_package() -> None:
    text = (ROOT / "docs" / "errors.md").read_text()
    own = {n: x for n, x in vars(errors).items() if isinstance(x, type) and x.__module__ == errors.__name__}
    named = {n for n, kind in own.items() if issubclass(kind, Exception)}
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.M)) == named


def test_operations_are_those_of_the_stages() -> None:
    text = (ROOT / "docs" / "design.md").read_text()
    row = r"^\| `(\w+)[][,a-z]*` \| (?:h2d|d2h|compute|network|host|read|write)\b"
    assert sorted(re.findall(row, text, re.M)) == sorted(STAGES)


def test_schedules_are_those_of_the_package() -> None:
    text = (ROOT / "docs" / "recipes.md").read_text()
    assert set(re.findall(r"^\| `([A-Z]\w+)`", text, re.M)) == set(schedules.__all__)


@pytest.mark.parametrize("model", ["tied GPT", pytest.param("odd sizes", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("precision", "micro_batches"), in_pairs(["fp32", "bf16"], [1, 2]))
def test_stage_1_has_other_bits_where_the_page_says_so(
    model: str, precision: str, micro_batches: int
) -> None:
    """On one rank: with ties in 16 bits, and with several micro-batches but for fp32 without ties."""
    weights: dict[int, dict[str, Any]] = {}
    for stage in (1, 2, 3):
        given = {"precision": precision, "micro_batches": micro_batches, "clip_norm": 0.5}
        program, batch = compiled(model, stage=stage, **given)
        weights[stage] = zfunc.params(program, steps(program, zfunc.init(program), batch, 0, 2)[0])
    ties, half, several = model == "tied GPT", precision == "bf16", micro_batches > 1
    for stage, alike in ((3, True), (1, not (ties and half) and not (several and (ties or half)))):
        same = all(bool((w == weights[2][name]).all()) for name, w in weights[stage].items())
        assert same == alike, f"stage {stage}"
