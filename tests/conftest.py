"""GPU tests are skipped, with the reason, where there is no GPU. Hypothesis is quiet about slow machines."""

import logging
import os

import pytest
import torch
from hypothesis import settings

settings.register_profile("zfunc", deadline=None, derandomize=True)
settings.load_profile("zfunc")
# These tensors are tiny; teams that spin on a busy machine would take all the time, here and in what tests start.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
logging.getLogger(
    "torch.__trace"
).propagate = False  # it formats everything for whoever listens, at any level


LONGEST = (
    "ranks",
    "tutorial",
    "resume",
    "native",
    "saving_ranks",
    "faults",
    "examples",
    "tracking",
    "soak",
    "laws",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take longest come first, so that two workers end at one time."""
    names = [f"test_{name}.py" for name in LONGEST]
    items.sort(key=lambda item: names.index(item.path.name) if item.path.name in names else len(names))
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, torch sees none")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
