"""What `make mutants` can change, and that what is explained in mutants.txt is still there."""

import mutants
import pytest


@pytest.mark.parametrize("module", mutants.WATCHED)
def test_every_mutant_has_a_name_and_is_another_program(module: str) -> None:
    of_module = mutants.mutants(module)
    assert len({m.name for m in of_module}) == len(of_module) > 5
    original = mutants.path_of(module).read_text()
    for mutant in of_module[:: len(of_module) // 4]:
        assert mutants.ast.dump(mutants.ast.parse(mutant.source())) != mutants.ast.dump(
            mutants.ast.parse(original)
        )


def test_a_clip_that_is_off_by_a_thousandth_is_among_them() -> None:
    assert "engine/step/clipping_stages: clip_factor: 1e-06 -> 0.001" in [
        m.name for m in mutants.mutants("engine/step/clipping_stages")
    ]


def test_what_is_explained_is_there() -> None:
    names = {m.name for module in mutants.WATCHED for m in mutants.mutants(module)}
    assert mutants.explained().keys() <= names
