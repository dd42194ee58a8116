"""What `import zfunc` offers: every name says what it is, and no module can take the place of a function."""

import importlib.util
import inspect

import pytest

import zfunc


@pytest.mark.parametrize("name", zfunc.__all__)
def test_a_public_name_has_a_docstring_and_is_what_it_is(name: str) -> None:
    value = getattr(zfunc, name)
    assert inspect.getdoc(value)
    assert name in dir(zfunc)
    # An import of a module `zfunc.plan` would put it in the place of the function.
    assert inspect.ismodule(value) or importlib.util.find_spec(f"zfunc.{name}") is None
