"""What `make mutants` can change, and that what is explained in mutants.txt is still there."""

import ast

import mutants
import pytest

MODULES = ("core/recipes", "engine/stages/clipping_stages", "optim/loss_scale")


def test_every_mutant_has_a_name_and_is_another_program() -> None:
    for module in MODULES:
        of_module = mutants.mutants(module)
        assert len({m.name for m in of_module}) == len(of_module) > 5
        original = ast.dump(ast.parse(mutants.path_of(module).read_text()))
        for mutant in of_module[:: len(of_module) // 4]:
            assert ast.dump(ast.parse(mutant.source())) != original


@pytest.mark.slow  # the nightly sample does it
def test_a_clip_that_is_off_by_a_thousandth_is_among_them_and_noticed() -> None:
    (mutant,) = (m for m in mutants.mutants(MODULES[1]) if m.name.endswith("clip_factor: 1e-06 -> 0.001"))
    tests = "tests/engine/test_gradients.py -k 'clipped and fp32'"
    assert mutants.passes(tests, 100)[0]
    assert not mutants.passes(tests, 100, mutant)[0]


def test_what_is_explained_is_there() -> None:
    names = mutants.explained().keys()
    modules = {name.partition(":")[0] for name in names}
    assert names <= {m.name for module in modules for m in mutants.mutants(module)}
    assert modules <= {*mutants.modules()}
