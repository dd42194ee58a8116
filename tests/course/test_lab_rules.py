"""What labs 5 to 8 grade by is what zfunc, torch and other witnesses say."""

from random import Random
from typing import Any

import numpy as np
import torch

from course.lab import LABS, load
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
