"""One text for the pretend device and for a GPU: a test that takes `device` runs on both.

The pretend device is for a process of its own, `pytest --device pretend tests/device`, which `make test` starts.
"""

from collections.abc import Iterator
from typing import Any

import pretend
import pytest
import torch

OWN_PROCESS = "runs in a process of its own: pytest --device pretend tests/device"


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--device") == "pretend" and not pretend.missing_tools():
        pretend.load()


def device_kinds(metafunc: pytest.Metafunc) -> None:
    """Rows of a test that takes `device`."""
    if "device" in metafunc.fixturenames and metafunc.definition.path.parent.name == "device":
        on_pretend = metafunc.config.getoption("--device") == "pretend"
        missing = pretend.missing_tools()
        refusal = f"needs {missing} to build the pretend device" if missing else OWN_PROCESS
        marks = [] if on_pretend and not missing else [pytest.mark.skip(reason=refusal)]
        kinds = [pytest.param("pretend", marks=marks)]
        if not on_pretend and "controls" not in metafunc.fixturenames:  # a GPU cannot be told to fail
            kinds.append(pytest.param("cuda", marks=[pytest.mark.gpu]))
        metafunc.parametrize("device", kinds, indirect=True)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """The device's type. The pretend one delays every piece of work by up to 0.2 ms and is set back afterwards."""
    controls: Any = pretend.load() if request.param == "pretend" else None
    if controls is None:
        yield request.param
        return
    controls.delay(2e-4, 1)
    yield request.param
    controls.delay(0.0, 0)
    controls.end_stalls()
    controls.set_sticky(False)
    controls.clear_error()
    for index in range(controls.device_count()):
        controls.set_capacity(index, 1 << 33)
    torch.accelerator.synchronize()


@pytest.fixture
def controls(device: str) -> Any:
    """What only the pretend device can do: hang, fail, run out of memory."""
    assert device == "pretend"
    return pretend.load()
