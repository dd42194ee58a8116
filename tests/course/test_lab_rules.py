"""What labs 5 to 8 grade by is what zfunc, torch and other witnesses say."""

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from zfunc.schedules import OneFOneB, ZeroBubble

from course import pipelines
from course.forgetful import Drive
from course.lab import LABS, load, load_lab
from course.leaderboard import lines, main, measures
from zfunc.core.pipeline import Pass, passes_in, passes_listed
from zfunc.errors import PlanError
from zfunc.optim.adamw import adam_update_


def laws(name: str) -> Any:
    return load(LABS / name / "laws.py", f"course_lab_{int(name[:2])}")


def test_the_rule_of_lab_5_has_the_bits_of_zfunc_and_is_near_torch() -> None:
    lab = laws("05_adamw")
    for seed in range(20):
        run = lab.random_run(Random(seed), 4)
        s = run.settings
        p, m, v = (
            torch.tensor(x).clone() for x in (np.float32(run.weights), *np.zeros((2, len(run.weights)), "f4"))
        )
        plain = p.clone().requires_grad_()
        adam = torch.optim.AdamW([plain], s.lr, (s.beta1, s.beta2), s.eps, s.weight_decay, foreach=False)
        for n, (step, weights) in enumerate(zip(run.steps, lab.reference(run), strict=True), start=1):
            grad = torch.tensor(step.grads, dtype=torch.float32)
            out = torch.empty(len(p), dtype=torch.bfloat16)
            betas = s.beta1, s.beta2
            adam_update_(
                p, m, v, grad, out=out, step=n, lr=s.lr, betas=betas, eps=s.eps, weight_decay=s.weight_decay
            )
            assert np.array_equal(p.numpy().view("u4"), weights.view("u4"))
            assert np.array_equal(out.view(torch.uint16).numpy(), lab.bf16(weights))
            plain.grad = grad
            adam.step()  # pyright: ignore[reportUnknownMemberType]
            torch.testing.assert_close(plain.detach(), p, rtol=1e-5, atol=1e-7)
    bits = np.arange(0, 1 << 32, 65_521, dtype=np.uint64).astype(np.uint32)
    numbers = bits.view(np.float32)
    theirs = torch.tensor(numbers).bfloat16().view(torch.uint16).numpy()
    assert np.array_equal(lab.bf16(numbers)[~np.isnan(numbers)], theirs[~np.isnan(numbers)])


def test_the_drive_of_lab_7_is_a_folder_until_the_power_fails(tmp_path: Path) -> None:
    """Random operations on it and on a real one; a cut right after a sync of all loses nothing."""
    by, drive = Random(0), Drive()
    for n in range(600):
        name, other, data = (
            by.choice("abc"),
            by.choice("abc"),
            bytes([n % 256]) * by.choice((0, 1, 700, 1_024)),
        )
        path = tmp_path / name
        offset = by.randint(0, 900) if data else 0
        match by.randrange(4) if path.exists() else -1:
            case -1:
                drive.create(name)
                path.touch(exist_ok=False)
            case 0:
                drive.delete(name)
                path.unlink()
            case 1:
                drive.rename(name, other)
                path.replace(tmp_path / other)
            case _:
                drive.write(name, offset, data)
                with path.open("r+b") as file:
                    file.seek(offset)
                    file.write(data)
        drive = by.choice([drive, *([*synced(drive).cuts()] if n % 9 == 0 else ())])
        assert drive.names() == sorted(x.name for x in tmp_path.iterdir())
        assert all(drive.read(x.name) == x.read_bytes() for x in tmp_path.iterdir())


def synced(drive: Drive) -> Drive:
    drive.sync_names()
    for name in drive.names():
        drive.sync(name)
    return drive


def test_a_cut_keeps_any_subset_of_what_no_sync_waited_for() -> None:
    drive = Drive()
    drive.create("a")
    drive.write("a", 510, b"1234")  # in two sectors
    found = {(tuple(x.names()), x.read("a") if x.names() else None) for x in drive.cuts()}
    whole, first, second = bytes(510) + b"1234", bytes(510) + b"12", bytes(512) + b"34"
    assert found == {((), None), *((("a",), data) for data in (b"", whole, first, second))}
    drive.sync("a")
    assert [x.names() for x in drive.cuts()] == [["a"], []]
    drive.sync_names()
    drive.rename("a", "b")
    assert [(x.names(), x.read(x.names()[0])) for x in drive.cuts()] == [(["b"], whole), (["a"], whole)]


def placed(order: pipelines.Order) -> list[list[Pass]]:
    return [[Pass(way, m, s, s) for way, m, s in own] for own in order]


def test_the_times_of_lab_8_are_those_of_zfunc_and_its_orders_pass_there() -> None:
    lab, ones = laws("08_pipelines"), [{"F": 1, "B": 2, "I": 1, "W": 1}]
    made = 0
    for seed in range(90):
        order = lab.random_order(Random(seed), swaps=seed % 2)
        lists = placed(order)
        n = len(order)
        try:
            theirs = {
                x[:3]: at for at, begins, x in passes_in(lists, range(n), ones * n, [0] * n) if not begins
            }
        except PlanError:  # a deadlock, or micro-batches do not ascend
            continue
        assert {x: span[1] for x, span in pipelines.times(order).items()} == theirs
        made += 1
    assert made > 15
    passes = load(LABS / "08_pipelines" / "solutions" / "passes.py", "solution_8")
    assert passes.one_f_one_b(4, 8) == [*map(list, OneFOneB()(4, 4, 8))]
    assert (
        f"{pipelines.idle(OneFOneB()(4, 4, 8)):.1%} {pipelines.idle(ZeroBubble()(4, 4, 8)):.1%}"
        == "27.3% 11.1%"
    )
    assert len(passes_listed(lambda n, _, m: passes.split(n, m), 4, 8, range(4), 4)) == 4
    assert [pipelines.kept(own) for own in ZeroBubble()(4, 4, 8)] == [4] * 4
    with pytest.raises(PlanError, match="devices that wait for each other"):
        passes_in(placed(lab.BROKEN), range(3), ones * 3, [0] * 3)
    assert set(pipelines.a_cycle(lab.BROKEN)) <= {x for own in lab.BROKEN for x in own}
    page = (LABS / "08_pipelines" / "README.md").read_text()
    assert all(
        f"device {d}  {'  '.join(f'{way}{m}' for way, m, _ in own)}" in page
        for d, own in enumerate(lab.BROKEN)
    )


def test_every_file_of_the_leaderboard_of_lab_6_measures_as_it_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = LABS / "06_format"
    for line in lines(folder / "leaderboard.jsonl"):
        assert measures(load_lab(6), line["code"]) == line["measures"], line["name"]
    wrong = [
        "--lab",
        "6",
        "--adapters",
        str(folder / "solutions" / "wrong_scales.py"),
        "--file",
        str(tmp_path / "b"),
    ]
    assert main(wrong) == 1
    assert "breaks " in capsys.readouterr().err
