"""The examples run as they are, with warnings as errors, and print what their prose announces."""

import gc
import logging
import re
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

import zfunc

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("[0-9]*.py"))

# Regular expressions that have to be found in the output, in this order.
PRINTS: dict[str, list[str]] = {
    "00_zfunc_in_200_lines.py": [
        r"^lanes: all; races: 0; last loss: (0\.\d+)$\nlanes: compute, d2h, host, h2d; races: 0; last loss: \1$",
        r"^same bits: True$",
        r"^race: accumulate\[0, 1\] does not wait for to_host\[0, 1\]$",
    ],
    "01_plain_loop.py": [
        r"^updates made: 100, rows seen: 25600$",
        r"^ step   zfunc     PyTorch$",
        r"^    1   (\d\.\d{5})   \1$",
        r"^largest difference below 1e-4: True$",
        r"^held out: \d\.\d+$",
        r"^layers\.0\.bias layers\.0\.weight layers\.1",
        r"^DonatedStateError: .*state, metrics = zfunc\.train_step\(program, state, batch\)",
    ],
    "02_swap_schedules.py": [
        r"^lane serial$\n  load\[0\]$\n  forward\[0,0\]$",
        r"^  pack\[0,0,0\]  after to_host\[0,2,0\]$",
        r"^31 operations, 14 waits$",
        r"^Overlapped   ([0-9a-f]{16})$\nInterleaved  (?!\1)[0-9a-f]{16}$",
        r"^simulated: .* on 1 lane$",
        r"^simulated: .* on 4 lanes$",
        r"^no schedule is faster than",
        r"^Overlapped\(\)$",
        r"^Interleaved\(\)$",
        r"^Overlapped   loss \d\.\d{6}  same bits as Serial: True$",
        r"^Interleaved  loss \d\.\d{6}  same bits as Serial: True$",
        r"^measured: .* on 4 lanes$",
    ],
    "03_write_a_schedule.py": [
        r"^update\[3\] reads decision, host_slot\[0\], master\[3\], exp_avg\[3\], exp_avg_sq\[3\]$",
        r"^35 operations, 73 pairs whose order counts$",
        r"^in graph order$\nsimulated: ",
        r"^deadlock: load\[0\] waits for to_host",
        r"^load\[0\]: got it on the lanes 0 times",
        r"^as it would start$\nsimulated: ",
        r"^as_it_would_start +(\d+\.\d ms) .*\nOverlapped +\1 ",
        r"^torch imported so far: ",
        r"^lanes: copies, compute, host; loss \d\.\d+$",
        r"^same bits as Serial: True$",
    ],
    "04_break_it.py": [
        r"^  pack\[0,1,1\]  after to_host\[0,2,0\]$",
        r"^PlanError: race on grad_slot\[0\]: to_host\[0,2,0\] \(lane d2h\) reads it, pack\[0,1,1\] "
        r"\(lane compute\) writes it",
        r"^->  pack\[0,1,1\]$",
        r"^->  to_host\[0,2,0\]  after update\[3\]$",
        r"^(\d+) waits, \1 deletions caught$",
        r"^bucket 2 holds: +(layer1\.0\.bias, layer2\.0\.weight)$\ndiffer after one step: .*layer2\.0\.weight",
        r"^differ after four steps:  [1-9] of 8 parameters$",
        r"^loss of Serial +\d\.\d+$\nloss of the broken plan +\d\.\d+$",
        r"^the good plan under the same delays: same bits as Serial: True$",
    ],
    "05_delayed_update.py": [
        *(rf"^{name}\nsimulated: .* on 4 lanes$" for name in ("plain", "deferred", "delayed", "partial")),
        r"^plain +1\.00 +1\.00 +1\.00 +1\.00$\ndeferred +0\.\d+ +1\.00 +1\.00 +1\.00$\n"
        r"delayed +0\.\d+ +1\.00 +1\.\d+ +1\.00$\n"
        r"partial +0\.\d+ +[1-9]\.\d+ +0\.\d+ +0\.\d+$",
        r"^plain +first loss (\d\.\d+)  last (\d\.\d+)  same bits as plain: True$\n"
        r"deferred +first loss \1  last \2  same bits as plain: True$\n"
        r"delayed +first loss \1  last \d\.\d+  same bits as plain: False$",
        r"^partial .* same bits as plain: True$",
        r"^load update forward backward pack square_sum squares_to_host to_host to_device global_norm decide$",
    ],
    "06_add_a_stage.py": [
        r"^simulated: .* 41 operations on 4 lanes$",
        r"^simulated: .* 49 operations on 4 lanes$",
        r"e send\s+w widen",
        r"^plain +loss after 8 steps (\d\.\d\d)\d+$\ncompressed +loss after 8 steps \d\.\d+$",
        r"^same bits as Serial: True$",
    ],
    "07_finetune_hf.py": [
        r"^<\|user\|> what comes after monday <\|end\|><\|assistant\|>$",
        r"^epochs: 15 of 15 sequences each: 57 steps$",
        r"^  learned: 116 of 331, in 29 documents not all$",
        r"^  > what comes after monday\n  \| it is tuesday$",
        r"^held out: [45]\.\d\d bits per token before, 0\.0\d after$",
        r"<\|assistant\|> it is tuesday <\|end\|>$",
        r"^transformers +(\d+\.\d{4})\d$\nin 1 parts +\1\d$\nin 2 parts +\1\d$",
    ],
    "08_larger_than_its_device.py": [
        r"^on the device .* does not fit$\nparameters on the host .* fits$\nactivations too .* fits$",
        r"^on the device +\d+ +\d+$\nparameters on the host +\d+ +\d+$\nactivations too +(\d+) +\1$",
        r"^on the device .*\nparameters on the host +\d+ +(\d+) .*\n.*\none by one +\d+ +\1 ",
        r"^l load   f fetch   o forward .* h hold ",
        r"^on the device +(first loss \d\.\d+  last \d\.\d+)  same bits: True$\n"
        r"parameters on the host +\1  same bits: True$\nactivations too +\1  same bits: True$",
    ],
    "09_groups.py": [
        r"^only the head: first loss (\d\.\d+)  last \d\.\d+, moved: head\.weight, head\.bias$",
        r"^rates at step 5: 0\.0051 0\.0064 0\.0080 0\.0100$",
        r"^layer by layer: first loss \d\.\d+  last 0\.\d+$",
        r"^bucket 0  lion-16bit  layer0\.0\.weight .*$\nbucket 1  sgd-16bit ",
        r"^bucket 4  lion-16bit  head\.weight to head\.weight$\ntwo optimizers: first loss \d\.\d+  last \d\.\d+$",
    ],
    "10_state_on_disk.py": [
        r"^in memory +\d+ +0 +0 +0$\nstate on the disk +\d+ +[1-9]\d+ +[1-9]\d+ +[1-9]\d+$\neverything ",
        r"^h2d .*\ncompute .*\nd2h .*\nhost .*\nread .*\nwrite ",
        r"^InjectedFault: page_out\[5\]: .*\nthe last commit is of step 2: training goes on from there$",
        r"^in memory +(first loss \d\.\d+  last \d\.\d+)  same bits: True$\n"
        r"state on the disk +\1  same bits: True$\neverything +\1  same bits: True$",
    ],
    "11_train_and_generate.py": [
        r"^   0 .*%  +([\d,]+) +([\d,]+)$" + r"\n +\d+ .*% +\1 +\2$" * 9,
        r"^same bits as without generating: True$",
        r"^ReleaseCost\(bytes_out=\d+, bytes_back=\d+, ",
    ],
    "12_pipeline.py": [
        r"^order: got passes with the weights embed.tok.weight on the devices \[0, 3\], expected one: ",
        r"^same losses as on one device: True$",
        r"^simulated: .* on 13 lanes$",
        r"^compute:3 ",
        r"^rank 0: stage 0, rows (.*)\nrank 1: stage 0, rows (?!\1)(.*)\nrank 2: stage 1, rows \1\nrank 3: .* \2$",
        r"^order: got devices that wait for each other .*device 1 has B\[7,1\] next, which follows B\[6,1\]",
    ],
    "13_reward_model.py": [
        r"^step  1: loss 0\.[67]\d+$\nstep 30: loss 0\.0\d+$",
        r"^chosen above rejected: 16 of 16 pairs$",
    ],
    "14_distillation.py": [r"^step  1: KL 0\.0[1-5]\d+$\nstep 40: KL 0\.00\d+$"],
    "15_truncated_bptt.py": [
        r"^window  1: loss 2\.7\d+$\nwindow 40: loss 2\.1\d+$",
        r"^largest difference of a loss below 1e-4: True$\n^the same hidden states: True, of 2 layers",
        r"^goes on: 2\.\d+$\n^begins: 2\.\d+$",
    ],
}
NEEDS = dict.fromkeys(
    ("07_finetune_hf.py", "13_reward_model.py"), "transformers"
)  # what `make test` need not have


@cache
def run(path: Path) -> tuple[str, dict[str, Any]]:
    """What an example prints as a program, warnings being errors, as everywhere here, and its variables. Once for
    all tests, and in this process: a new one would spend seconds on importing torch.
    """
    variables: dict[str, Any] = {"__name__": "__main__", "__file__": str(path)}
    gc.collect()
    gc.freeze()  # tensors of other tests are none of those that it may count
    with redirect_stdout(StringIO()) as printed, redirect_stderr(StringIO()) as complaints:
        exec(compile(path.read_text(), str(path), "exec"), variables)
    assert not complaints.getvalue()
    return printed.getvalue(), variables


def in_order(output: str, patterns: list[str]) -> None:
    at = 0
    for pattern in patterns:
        match = re.compile(pattern, re.MULTILINE).search(output, at)
        assert match, f"expected {pattern!r} after the first {at} characters of:\n{output}"
        at = match.end()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_prints_what_it_announces(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if path.name in NEEDS:
        pytest.importorskip(NEEDS[path.name])
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(path.parent)  # as where it is a program
    in_order(run(path)[0], PRINTS[path.name])
    assert not [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.slow
def test_what_an_example_says_of_all_modules_holds_in_a_python_of_its_own() -> None:
    """By day test_packages.py says that what it uses till then imports no torch."""
    command = [sys.executable, "-W", "error", "examples/03_write_a_schedule.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert "torch imported so far: False\n" in done.stdout


def test_every_example_is_here_and_can_be_read_aloud() -> None:
    assert [path.name for path in EXAMPLES] == [*PRINTS]
    for path in EXAMPLES:
        most = 200 if path.name == "00_zfunc_in_200_lines.py" else 170
        assert len(path.read_text().splitlines()) <= most, f"{path.name} is long: say less, or split it"


def test_a_plain_step_is_read_in_few_files() -> None:
    """Those whose functions the second step calls: as many as docs/design.md says, of 5,400 lines at most."""
    _, first = run(EXAMPLES[1])
    program, batch, step, files = first["program"], first["batch"], zfunc.train_step, set[Path]()
    state, _ = step(program, zfunc.init(program), batch(0))
    sys.setprofile(lambda frame, _event, _arg: files.add(Path(frame.f_code.co_filename)))
    try:
        step(program, state, batch(1))
    finally:
        sys.setprofile(None)
    own = [x for x in files if x.is_relative_to(Path(zfunc.__file__).parent)]
    (said,) = re.findall(r"example 01 calls functions in (\d+) files", (ROOT / "docs/design.md").read_text())
    assert len(own) == int(said), sorted(own)
    assert sum(len(x.read_text().splitlines()) for x in own) <= 5_400


@pytest.fixture
def small() -> dict[str, Any]:
    """The variables of the first file after it has run."""
    return run(EXAMPLES[0])[1]


def test_zfunc_in_200_lines_gives_the_bits_of_zfunc(small: dict[str, Any]) -> None:
    """Losses and weights of 100 steps, under both of its schedules, are those of the plain loop."""
    assert "import zfunc" not in EXAMPLES[0].read_text()
    assert "from zfunc" not in EXAMPLES[0].read_text()
    _, first = run(EXAMPLES[1])
    assert small["losses"] == [first["ours"]] * 2
    trained = first["plain"].state_dict().values()  # zfunc's weights, loaded at its end
    weights = torch.cat([p.flatten() for p in trained])
    assert [weights.equal(own) for own in small["weights"]] == [True, True]


def test_every_wait_of_zfunc_in_200_lines_is_needed(small: dict[str, Any]) -> None:
    """Without a wait there is a race, and with waits in a circle a deadlock."""
    plan, verify = small["plan"], small["verify"]
    assert not [*verify(plan)]
    for j, waits in enumerate(plan.waits):
        for i in waits:
            assert [*verify(plan._replace(waits=[*plan.waits[:j], waits - {i}, *plan.waits[j + 1 :]]))]
    with pytest.raises(ValueError, match="cycle"):
        small["happens_before"](plan._replace(waits=[{len(plan.ops) - 1}, *plan.waits[1:]]))


def test_an_error_in_a_lane_of_zfunc_in_200_lines_ends_the_step(small: dict[str, Any]) -> None:
    def fail(*index: int) -> None:
        raise OSError("the copy failed")

    training = small["Training"](small["model"])
    training.to_host = fail
    with pytest.raises(OSError, match="the copy failed"):
        small["execute"](small["plan"], training, small["batch"](0))


@pytest.mark.slow
def test_the_reward_model_has_the_gradients_of_plain_pytorch() -> None:
    pytest.importorskip("transformers")
    _, given = run(ROOT / "examples/13_reward_model.py")
    model, inputs, one = given["model"], given["inputs"], zfunc.SGD(lr=1.0)
    program = zfunc.compile(given["segments"], **given["options"] | {"optimizer": one})
    state, metrics = zfunc.train_step(program, zfunc.init(program), given["batch"])
    scores = model(**inputs).logits
    loss = -torch.nn.functional.logsigmoid(scores[0::2, 0] - scores[1::2, 0]).mean()
    as_plain(model, loss, metrics.loss, zfunc.params(program, state))


def as_plain(model: Any, loss: torch.Tensor, ours: float, after: dict[str, torch.Tensor]) -> None:
    """The loss, and each gradient: what a step of SGD at a rate of 1 took from the model's own values."""
    assert ours == pytest.approx(float(loss.detach()), abs=1e-6)
    loss.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach() - after[name], p.grad, atol=1e-6, rtol=1e-5)


def test_the_student_has_the_gradients_of_plain_pytorch() -> None:
    _, given = run(ROOT / "examples/14_distillation.py")
    ids, parts = given["ids"], given["parts"]
    student = zfunc.compile(
        [zfunc.segment(name, m) for name, m in parts], optimizer=zfunc.SGD(lr=1.0), precision="fp32"
    )
    logits = zfunc.apply(given["teacher"], given["knowing"], ids)
    state, metrics = zfunc.train_step(student, zfunc.init(student), (ids, logits))
    x, known = ids, zfunc.params(given["teacher"], given["knowing"])
    for _, module in parts[:-1]:
        x = module(x)
    own, y = parts[-1][1].head.logits(x), ids
    for name, module in given["known"]:
        module.load_state_dict({k: known[f"{name}.{k}"] for k in module.state_dict()})
        y = module(y) if name != "head" else module.logits(y)
    torch.testing.assert_close(logits, y.detach(), atol=1e-6, rtol=1e-5)
    p, q = (torch.softmax(t.flatten(0, 1) / 2, -1) for t in (y.detach(), own))
    loss = 4 * (p * (p.log() - q.log())).sum(1).mean()
    as_plain(torch.nn.ModuleDict(dict(parts)), loss, metrics.loss, zfunc.params(student, state))
