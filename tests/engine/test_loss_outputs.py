"""What the last segment returns. That auxiliary outputs are those of a plain loop is a law (plain.follow)."""

from typing import Any

import pytest
import torch
from small_models import regression
from torch import Tensor, nn

import zfunc


class Distance(nn.Linear):
    """An auxiliary output whose name depends on the number of rows."""

    def forward(self, x: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Any]]:
        distance = (super().forward(x).squeeze(-1) - targets).abs()
        return distance.mean(), {"largest" if len(x) > 2 else "only": distance.max(), "constant": 2}


def test_evaluation_returns_them_on_request_and_every_batch_has_the_same_names() -> None:
    program = zfunc.compile([zfunc.segment("s", Distance(8, 1))], precision="fp32", device="cpu")
    state, (inputs, targets) = zfunc.init(program), regression(4)(0)
    loss, aux = zfunc.evaluate(program, state, (inputs, targets), has_aux=True)
    assert loss == zfunc.evaluate(program, state, (inputs, targets))
    assert aux["constant"] == 2
    assert aux["largest"] > loss
    state, metrics = zfunc.train_step(program, state, (inputs, targets))
    assert (metrics.loss, metrics.aux) == (loss, aux)
    with pytest.raises(
        ValueError, match=r"'s': got the auxiliary outputs \('constant', 'only'\).*same names"
    ):
        zfunc.train_step(program, state, (inputs[:2], targets[:2]))
    with pytest.raises(
        TypeError, match=r"apply: got 0 arguments.* \(x.*targets.*pass the targets.*targets=None"
    ):
        zfunc.apply(program, state, inputs)
    assert torch.is_tensor(zfunc.apply(program, state, inputs, targets)[1]["largest"])
