"""Help as one reads it: every command, its options in order, its defaults, and examples that can be typed."""

import argparse
import re
import shlex
import shutil
import sys
from inspect import cleandoc
from pathlib import Path
from textwrap import indent

import attrs
import pytest
import torch

import zfunc
from zfunc.cli.catalogue import COMMANDS
from zfunc.cli.main import _parse, _settings, main
from zfunc.cli.parser import make_parser
from zfunc.options import GROUPS, flag
from zfunc.planner.profile import FOLDER

Out = pytest.CaptureFixture[str]
every_command = pytest.mark.parametrize("name", COMMANDS)
EXAMPLES = [
    (name, typed)
    for name, command in COMMANDS.items()
    for typed in re.findall(r"^(?!#)\S.*(?:\n .*)*", cleandoc(command.examples), re.MULTILINE)
]


def help_of(name: str, capsys: Out, asked: str = "") -> str:
    assert main([name, asked or ("--help-all" if common_of(name) else "--help")]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def options_of(text: str) -> dict[str, str]:
    """What help says of each option."""
    body = text.partition("\nexamples:\n")[0]
    lines = re.findall(r"^  (--\S+|-h, --help|[A-Z]+|\S+\|\S+) (.*?)(?=^  \S|^\n|\Z)", body, re.M | re.S)
    return {name: " ".join(words.split()) for name, words in lines}


def common_of(name: str) -> set[str]:
    """The flags of the short help."""
    return {flag(field) for field, option in COMMANDS[name].options.items() if option.common}


@every_command
@pytest.mark.parametrize("columns", [60, 80, 120, 300])
def test_help_fits_its_columns(name: str, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: Out) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = help_of(name, capsys)
    prose = text.partition("\nexamples:\n")[0] if columns < 80 else text
    assert max(map(len, prose.splitlines())) <= min(columns, 120)
    assert not re.search(r"\w-$", prose, re.MULTILINE), "no flag is cut in two"
    words = {x for command in COMMANDS.values() for x in command.options if "_" in x}
    assert not words & {*re.findall(r"\w+", prose)}, "Python's spelling of an option"


@every_command
def test_help_has_every_option_once_with_its_default_and_what_there_is_to_choose_from(
    name: str, capsys: Out
) -> None:
    command, lines = COMMANDS[name], options_of(help_of(name, capsys))
    fields = attrs.fields_dict(command.settings)
    assert command.options.keys() == fields.keys()
    for field in fields.values():
        option = command.options[field.name]
        line = lines[option.metavar if option.positional else flag(field.name)]
        required = option.positional or (field.name == "out" and name in ("export", "import"))
        assert ("(default: " in line) is not (field.type is bool or required), line
        assert line.count("(default: ") <= 1
        assert all(word in line or word in option.metavar for word in option.words)


@pytest.mark.parametrize("name", [*filter(common_of, COMMANDS)])
def test_help_is_a_screen_of_what_most_people_need(
    name: str, capsys: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    text = help_of(name, capsys, "--help")
    assert len(text.splitlines()) <= 56
    assert options_of(text).keys() - {"-h, --help", "--debug"} == common_of(name) | {"--help-all"}


@every_command
def test_groups_come_in_the_order_of_a_reader(name: str, capsys: Out) -> None:
    groups = re.findall(r"^([a-z ]+):$", help_of(name, capsys), re.MULTILINE)
    assert groups[-2:] == ["help", "examples"]
    own = groups[:-2]
    assert own == sorted(own, key=GROUPS.index)
    assert len(own) == len(set(own))


@pytest.mark.parametrize(("name", "typed"), EXAMPLES, ids=[typed[:60] for _, typed in EXAMPLES])
def test_examples_can_be_typed(
    name: str, typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("runs", "model", "texts"):
        Path(folder).mkdir()
    Path("model/config.json").write_text("{}")
    shutil.copy(FOLDER / "h100.toml", "machine.toml")
    words = shlex.split(typed.replace("\\\n", ""))
    words = shlex.split(words[-1].strip("$()")) if words[0] == "eval" else words
    words = [w.strip("<()") for w in words if w not in ("source",)]
    words = words[: words.index(">")] if ">" in words else words
    assert ("zfunc" in words[0]) or words[:4] == ["torchrun", "--nproc-per-node", "2", "-m"]
    args = argparse.Namespace()
    _parse(words[words.index("zfunc") + 1 :], args)
    assert args.command == name
    assert isinstance(_settings(COMMANDS[name], args), COMMANDS[name].settings)
    assert indent(typed, "  ") in help_of(name, capsys)


def test_the_list_of_commands(capsys: Out) -> None:
    assert main([]) == 2
    text = capsys.readouterr().out
    assert main(["--help"]) == 0
    assert capsys.readouterr().out == text
    for name, command in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(command.summary)}$", text, re.MULTILINE), "a line each"
        assert 2 <= [of for of, _ in EXAMPLES].count(name) <= 4
    assert list(make_parser(COMMANDS)[1]) == list(COMMANDS)


def test_versions(capsys: Out) -> None:
    assert main(["--version"]) == 0
    python = ".".join(map(str, sys.version_info[:3]))
    release, _, _ = torch.__version__.partition("+")  # wheels of PyPI have no "+cu130" in their metadata
    versions = [
        f"zfunc {zfunc.__version__} (torch {x}, Python {python})\n" for x in (release, torch.__version__)
    ]
    assert capsys.readouterr().out in versions
