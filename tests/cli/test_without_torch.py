"""What plans and draws a GPT needs NumPy and attrs alone, and prints what it prints beside torch."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from zfunc.cli.main import main

WITHOUT = ("torch", "functorch", "rich", "json5", "shtab", "zfunc._cpu_adam")
LINES = (
    "plan",
    "plan --hardware rtx4090 --world 2 --batch-size 8 --precision bf16 --optimizer lion --json",
    "draw --hardware v100-32gb --params-on host --activations-on host --recompute min-cut",
)
BLOCKED = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in {WITHOUT}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
from zfunc.cli.main import main
"""


def blocked(code: str, **given: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", BLOCKED + code], capture_output=True, text=True, **given)


def test_a_gpt_is_planned_and_drawn_without_torch(capsys: pytest.CaptureFixture[str]) -> None:
    printed = blocked(f"for line in {LINES}: main(line.split())")
    for line in LINES:
        assert main(line.split()) in (0, 1)
    assert (printed.stdout, printed.stderr) == tuple(capsys.readouterr())
    assert "layers" in printed.stdout


REFUSED = {
    "train": "package 'torch' is not installed: pip install torch\n",
    "train --data nowhere": "--data: got nowhere, which does not exist, expected what is to be",
    "train --hf nowhere": "--hf: nowhere: got no config.json in it, expected a local folder",
    "train --resume nowhere": "--resume: got nowhere, which does not exist",
    "train --state-on disk --swap /dev/shm": "/dev/shm: got a folder in memory (tmpfs)",
    "train --data cut.jsonl": "--data: cut.jsonl, the last line: got invalid JSON (Unterminated string",
    "train --eval-data asks.jsonl": "--eval-data: asks.jsonl, line 1: got a chat without a turn of the assistant",
    **{
        f"train --data chat.jsonl --tokenizer {x}/tokenizer.json": f"--tokenizer: got {x}/{y} with a chat template "
        f"that is no Jinja (line 1: {z}"
        for x, y, z in (
            ("jinja", "chat_template.jinja", "Unexpected end of template"),
            ("config", "tokenizer_config.json", "unexpected '}'"),
        )
    },
    "plan --hf-config nowhere.json": "--hf-config: nowhere.json: got no such file, expected the config",
    "draw --hf nowhere": "--hf: nowhere: got no config.json in it, expected a local folder",
}


FILES = {
    "cut.jsonl": '{"text": "a"}\n' * 20_000 + '{"text": "b',
    "asks.jsonl": '{"messages": [{"role": "user", "content": "?"}]}',
    "chat.jsonl": '{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}',
    "jinja/chat_template.jinja": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}",
    "config/tokenizer_config.json": '{"chat_template": "{% if messages }{% break %}{% endif %}"}',
}


FORKS = f"""
import os
for n, line in enumerate({[*REFUSED]}):
    if not os.fork():
        os.dup2(os.open(f"{{n}}.txt", os.O_WRONLY | os.O_CREAT), 2)
        sys.exit(main(line.split()))
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """The exit code of each line and what it says, in a fork each of one Python that has imported the command."""
    folder = tmp_path_factory.mktemp("refused")
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
        (folder / name).with_name("tokenizer.json").touch()
    done = blocked(FORKS, cwd=folder, env={**os.environ, "XDG_CACHE_HOME": str(folder)})
    codes = map(int, done.stdout.split())
    return {
        x: (code, (folder / f"{n}.txt").read_text())
        for n, (x, code) in enumerate(zip(REFUSED, codes, strict=True))
    }


@pytest.mark.parametrize("line", REFUSED)
def test_what_is_refused_without_torch_is_said_in_a_line(line: str, said: dict[str, tuple[int, str]]) -> None:
    code, text = said[line]
    assert code == 2
    assert text.startswith(f"zfunc {line.split()[0]}: error: {REFUSED[line]}")
    assert text.count("\n") == 1


LATER = {  # packages read them, none of which imports torch for it
    "train --data chat.jsonl --tokenizer refuses/tokenizer.json": "--data: chat.jsonl, line 1: got a chat that the "
    "chat template refuses (No user!), expected its roles in its order",
    "train --data rows": "--data: rows, row 1: got a chat without a turn of the assistant to learn",
}


@pytest.mark.parametrize("line", LATER)
def test_records_are_looked_at_before_torch_is_imported(line: str, own_folder: Path) -> None:
    pytest.importorskip("transformers")
    parquet = pytest.importorskip("pyarrow.parquet")
    for name in ("refuses", "rows"):
        (own_folder / name).mkdir()
    (own_folder / "refuses/tokenizer.json").touch()
    (own_folder / "refuses/chat_template.jinja").write_text("{{ bos_token + raise_exception('No user!') }}")
    (own_folder / "chat.jsonl").write_text(FILES["chat.jsonl"])
    chat = json.loads(FILES["chat.jsonl"])["messages"]
    rows = pytest.importorskip("pyarrow").Table.from_pydict({"messages": [chat, chat[:1]]})
    parquet.write_table(rows, own_folder / "rows/train.parquet")
    code = f"import sys; from zfunc.cli.main import main; n = main({line.split()})"
    code += "; print('torch' in sys.modules, n)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False 2\n"
    assert done.stderr.startswith(f"zfunc train: error: {LATER[line]}")


@pytest.mark.parametrize("line", ["train --steps 1", "doctor", "calibrate", "export none --out x"])
def test_too_few_addresses_for_torch_are_said_before_python_dies_of_them(line: str) -> None:
    """Between 480 and 620 MB the import ends with ABORT, with std::bad_alloc, or anyhow."""
    limit = "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (540 << 20, -1))"
    code = f"{limit}; from zfunc.cli.main import main; sys.exit(main({line.split()}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    expected = f"zfunc {line.split()[0]}: error: RLIMIT_AS: got 540.0 MiB of addresses, expected "
    assert done.stderr.startswith(expected)
    assert done.stderr.endswith("raise it by ulimit -v\n")
    assert done.stderr.count("\n") == 1
