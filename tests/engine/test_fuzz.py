"""The quick part of `make fuzz`: a few random models under random settings. CI's nightly form takes 300."""

import fuzz
import fuzz_models
import pytest

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.parametrize(
    "seed", [*range(8), *(pytest.param(n, marks=pytest.mark.slow) for n in range(8, 16))]
)
def test_a_random_model_trains_as_plain_pytorch_does(seed: int) -> None:
    fuzz.run(fuzz.case(seed))


def test_a_failing_case_is_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(case: fuzz.Case) -> None:
        assert not ("lstm" in case.model.segments[0] and case.settings.get("stage") == 1)

    monkeypatch.setattr(fuzz, "run", run)
    model = fuzz_models.Model((("gelu", "lstm"), ("norm",)), ("dict", "tuple"), "sum", True, ((0, 1),))
    least = fuzz.shrunk(fuzz.Case(model, {"stage": 1, "micro_batches": 3}), AssertionError())
    assert least == fuzz.Case(fuzz_models.Model((("lstm",),), ("tensor",), "sum"), {"stage": 1})
