"""What `import zfunc` offers: every name is there, says what it is, and what it takes."""

import inspect

import pytest

import zfunc


@pytest.mark.parametrize("name", zfunc.__all__)
def test_a_public_name_has_a_docstring(name: str) -> None:
    value = getattr(zfunc, name)
    assert inspect.getdoc(value)
    assert value is getattr(zfunc, name)
    assert name in dir(zfunc)
