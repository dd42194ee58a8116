"""What `import zfunc` offers: every name says what it is, and no module can take the place of a function."""

import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import zfunc


def test_compile_has_no_more_parameters_than_were_decided() -> None:
    assert len(inspect.signature(zfunc.compile).parameters) <= 37


def test_modules_are_imported_by_their_public_names() -> None:
    """In a process that has imported nothing else, so that no import before makes it work."""
    code = "import zfunc.hf; from zfunc.lr import WarmupCosine; import zfunc; from zfunc.models import hf"
    check = "assert zfunc.hf is hf and zfunc.lr.WarmupCosine is WarmupCosine"
    subprocess.run([sys.executable, "-c", f"{code}; {check}"], check=True)


def test_sources_that_are_not_installed_say_so(tmp_path: Path) -> None:
    (tmp_path / "zfunc").symlink_to(Path(zfunc.__file__).parent)
    command = [sys.executable, "-S", "-c", "import zfunc"]  # without what is installed
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert "ImportError: got zfunc from" in done.stderr
    assert "which is not installed, expected an installed one: pip install -e ." in done.stderr


@pytest.mark.parametrize("name", zfunc.__all__)
def test_a_public_name_has_a_docstring_and_is_what_it_is(name: str) -> None:
    value = getattr(zfunc, name)
    assert inspect.getdoc(value)
    assert name in dir(zfunc)
    # An import of a module `zfunc.plan` would put it in the place of the function.
    assert inspect.ismodule(value) or importlib.util.find_spec(f"zfunc.{name}") is None


def test_an_error_that_is_no_public_name_is_named_where_it_is() -> None:
    with pytest.raises(
        AttributeError, match=r"no attribute 'LaneTimeout': it is zfunc\.errors\.LaneTimeout$"
    ):
        _ = zfunc.LaneTimeout
    with pytest.raises(AttributeError, match="no attribute 'did_you_mean'$"):
        _ = zfunc.did_you_mean
