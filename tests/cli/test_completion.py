"""Completion as a shell does it: the printed script is sourced in bash, zsh or fish, and asked."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from zfunc import schedules
from zfunc.cli.catalogue import COMMANDS, SHELLS
from zfunc.cli.main import main
from zfunc.core.dtypes import PRECISIONS
from zfunc.core.optimizer_state import MOMENTS
from zfunc.core.setting_values import BY_DEVICE, PLACES, RECOMPUTE
from zfunc.planner.profile import profile_names as profiles
from zfunc.train.settings import DEVICES

BASH = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
$(complete -p zfunc | sed 's/.*-F \\([^ ]*\\) .*/\\1/') zfunc
printf '%s\\n' "${COMPREPLY[@]}"
"""
FISH = 'source $argv[1]; complete -C "$argv[2]"'
ASKED = {
    "zfunc ": set(COMMANDS),
    "zfunc tr": {"train"},
    "zfunc train --sch": {"--schedule"},
    "zfunc train --schedule ": {BY_DEVICE, *schedules.__all__},
    "zfunc draw --schedule a": {"all"},
    "zfunc plan --json --schedule a": {"auto"},
    "zfunc train --precision ": {"auto", *PRECISIONS},
    "zfunc train --steps 5 --moments ": set(MOMENTS),
    "zfunc calibrate --recompute ": {"auto", *RECOMPUTE},
    "zfunc train --device ": set(DEVICES),
    "zfunc train --stage ": {"1", "2", "3"},
    "zfunc plan --params-on ": {*PLACES, "disk", "auto"},
    "zfunc train --order v": {"vertical"},
    "zfunc plan --hardware h": {name for name in profiles() if name.startswith("h")},
    "zfunc train --data n": {"notes.txt"},
    "zfunc train --data texts/": {"texts/a.txt"},
    "zfunc train --resume ": {"here.toml", "notes.txt", "runs", "texts"},
    "zfunc report r": {"runs"},
    "zfunc report ": {"runs", "texts"},
    "zfunc train --hf ": {"runs", "texts"},
    "zfunc completion ": set(SHELLS),
}


@pytest.fixture(autouse=True)
def some_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("runs", "texts"):
        Path(folder).mkdir()
    for file in ("here.toml", "notes.txt", "texts/a.txt"):
        Path(file).touch()


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A file with the script for each shell."""
    paths = {shell: tmp_path_factory.mktemp("script") / f"zfunc.{shell}" for shell in SHELLS}
    for shell, path in paths.items():
        with pytest.MonkeyPatch.context() as patch, path.open("w") as out:
            patch.setattr("sys.stdout", out)
            assert main(["completion", shell]) == 0
    return paths


def has(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}, which is not installed here")


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_takes_the_script(shell: str, scripts: dict[str, Path]) -> None:
    has(shell)
    done = subprocess.run([shell, "-n", scripts[shell]], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_what_is_offered(shell: str, scripts: dict[str, Path]) -> None:
    has(shell)
    for line, expected in ASKED.items():
        bash = ["-c", BASH, "bash", scripts[shell], *line.split(" ")]
        command = bash if shell == "bash" else ["-c", FISH, scripts[shell], line]
        done = subprocess.run([shell, *command], capture_output=True, text=True)
        assert done.stderr == ""
        assert {x.partition("\t")[0].rstrip("/") for x in done.stdout.splitlines()} == expected, line


def test_every_fixed_choice_is_offered(scripts: dict[str, Path]) -> None:
    """By what the options themselves check, so that a new one is completed too."""
    line = re.compile(
        r"^complete -c zfunc -n '_shtab_zfunc_using (\w+)' -l (\S+) -xka \"([^\"]*)\"", re.MULTILINE
    )
    offered = {(m[1], m[2]): m[3].split() for m in line.finditer(scripts["fish"].read_text())}
    choices = {
        (command, name.replace("_", "-")): option
        for command, of in COMMANDS.items()
        for name, option in of.options.items()
        if option.words and not option.positional
    }
    assert len(choices) > 10
    for key, option in choices.items():
        assert set(option.words) <= set(offered[key])
        for word in option.words:
            option.check(key[1].replace("-", "_"), word)
