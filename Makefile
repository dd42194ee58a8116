# Two commands: `make train` and `make test`. Each sets up its own .venv first, from constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
NATIVE := zfunc/_cpu_adam.pyx zfunc/_adam_kernel.h setup.py pyproject.toml constraints.txt

.PHONY: train test gpu lint bench pictures clean

train: $(STAMP)
	$(BIN)/zfunc train

test: $(STAMP) lint
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

# Torch comes first, by its tested version: an open range would fetch the newest build, with gigabytes of CUDA.
$(STAMP): $(NATIVE)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch numpy setuptools wheel cython
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[test,lint]"
	touch $(STAMP)

LARGE := --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 1024 --batch-size 8 \
	--precision bf16 --turns 7 --compile-segments

# On a machine with a GPU: builds in place with what is installed, installs nothing from a registry.
gpu:
	$(PYTHON) -m pip install --quiet --no-build-isolation --no-deps --no-index --editable .
	$(PYTHON) -m pytest -m gpu tests
	$(PYTHON) -m benchmarks.step --json benchmarks/results
	$(PYTHON) -m benchmarks.step $(LARGE) --json benchmarks/results
	$(PYTHON) -m benchmarks.adam --json benchmarks/results
	$(PYTHON) -m benchmarks.plan --json benchmarks/results

bench: $(STAMP)
	$(BIN)/python -m benchmarks.adam
	$(BIN)/python -m benchmarks.plan
	$(BIN)/python -m benchmarks.step

pictures: $(STAMP)
	$(BIN)/python docs/make_pictures.py

clean:
	rm -rf $(VENV) build *.egg-info zfunc/*.so zfunc/_cpu_adam.c
