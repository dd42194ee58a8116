"""The quick part of `make fuzz`: a few random models under random settings, and segments in tiles. The nightly form
takes 300 models and 1,200 segments."""

import fuzz
import fuzz_models
import pytest
import torch

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(n, marks=pytest.mark.slow) for n in range(3, 16))]
)
def test_a_random_model_trains_as_plain_pytorch_does(seed: int) -> None:
    fuzz.run(fuzz.case(seed))


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_random_segments_pass_in_tiles_if_their_tokens_are_apart(seed: int) -> None:
    for given in fuzz.segments(seed):
        fuzz.run(given)


@pytest.mark.slow
def test_every_piece_either_keeps_tokens_apart_or_is_refused() -> None:
    """One by one; what is there to be refused alone is in test_tile_check.py, too."""
    for name in {**fuzz_models.KEEPING, **fuzz_models.ATTENDING}:
        if name not in fuzz_models.RANDOM:
            fuzz.run(fuzz_models.Rows((name,)))


def test_a_failing_case_is_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(case: fuzz.Case | fuzz_models.Rows) -> None:
        if isinstance(case, fuzz_models.Rows):
            assert "flip" not in case.pieces
            return
        assert not ("lstm" in case.model.segments[0] and case.settings.get("stage") == 1)

    monkeypatch.setattr(fuzz, "run", run)
    model = fuzz_models.Model((("gelu", "lstm"), ("norm",)), ("dict", "tuple"), "sum", True, ((0, 1),))
    least = fuzz.shrunk(fuzz.Case(model, {"stage": 1, "micro_batches": 3}), AssertionError())
    assert least == fuzz.Case(fuzz_models.Model((("lstm",),), ("tensor",), "sum"), {"stage": 1})
    rows = fuzz_models.Rows(("gelu", "flip", "norm"), dtype=torch.bfloat16)
    assert fuzz.shrunk(rows, AssertionError()) == fuzz_models.Rows(("flip",))
