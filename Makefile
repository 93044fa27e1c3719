# make demo-torch   train on several ranks through `pyflyte run`: needs no compiler
# make demo   train a real model with real Horovod on several ranks, through `pyflyte run`
# make check  lint, types and the quick tests, while editing
# make test   all tests that need no container
# make help   everything else
#
# Needs Linux, Python 3.10-3.12 with venv and headers, a C++ compiler, and make. Everything goes into .venv; the Horovod
# wheel is kept in the user's cache (horovod_build/build.py), so that it is compiled once per machine.

PYTHON ?= python3
ifndef TORCH
TORCH := $(shell $(PYTHON) -c 'import sys; print([line.split(";")[0] for line in open("requirements/torch.txt") if line.startswith("torch==")][sys.version_info < (3, 11)])' 2>/dev/null)
endif
# For scripts/build_image.py, which make calls and the container tests do.
export TORCH
VENV ?= .venv
# Further options for pip, e.g. PIP_OPTIONS="--extra-index-url ..." for a CPU build of torch: the default index's is a
# CUDA build with its libraries, 2.6 GB to download and 5.5 GB in .venv.
PIP_OPTIONS ?=
# "nccl" builds Horovod for GPUs; needs a CUDA build of torch. For CUDA 13 the compiler comes from pip where no CUDA
# toolkit is there; for CUDA 12 a toolkit must be (HOROVOD_CUDA_HOME). No GPU is needed to build.
HOROVOD_GPU ?= none
PYTEST_OPTIONS ?=
# Rooms and options for `make mutants`, as scripts/mutants.py takes them; empty: a hundred over all rooms.
MUTANTS ?=
# Tests side by side; empty: twice the cores, 16 at most. 0: one after the other, as for pdb.
WORKERS ?=
export WORKERS
IMAGE_OPTIONS ?=
# Of `make simulation`.
ORDERS ?= 200000

# The one line that `make demo` is about.
DEMO = $(BIN)/pyflyte run examples/digits_horovod.py digits
# What CI runs besides, in the shell's words.
EXAMPLES = $(BIN)/pyflyte run examples/digits_ddp.py digits && $(BIN)/python examples/fs_races.py

# Else each of hundreds of interpreters compiles this package again, and each worker all tests: half of its start.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
CONSTRAINTS := requirements/constraints.txt
PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) $(PIP_OPTIONS)

# Stamps live inside the venv: removing it forgets them. The name of torch's stamp holds the version asked for, so that
# `make TORCH=...` installs that one, and builds Horovod anew for it.
TORCH_STAMP := $(VENV)/.stamp-$(subst /,_,$(subst =,-,$(strip $(TORCH))))
PACKAGE_STAMP := $(VENV)/.stamp-package
HOROVOD_STAMP := $(TORCH_STAMP)-horovod-$(HOROVOD_GPU)
DEV_STAMP := $(VENV)/.stamp-dev
LIBRARIES_STAMP := $(VENV)/.stamp-libraries

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo examples check test test-container wheel gpu coverage mutants corners matrix simulation lint types docs demo-torch constraints format bench image clean

help:
	@sed -n 's/^## //p' Makefile

## make demo            train with Horovod on this machine (first time: some minutes, then seconds)
demo: $(PACKAGE_STAMP) $(HOROVOD_STAMP)
	$(DEMO)

## make demo-torch      train with torch's DistributedDataParallel: the same, without Horovod and its compiler
demo-torch: $(PACKAGE_STAMP)
	$(BIN)/pyflyte run examples/digits_ddp.py digits

## make test            unit, race and end-to-end tests on this machine
test: $(DEV_STAMP) $(LIBRARIES_STAMP) $(HOROVOD_STAMP)
	$(BIN)/nox -s tests -- $(PYTEST_OPTIONS)

## make check           lint, types, and the tests that start no processes: the first tier, for the edit loop
check: lint types $(HOROVOD_STAMP)
	$(BIN)/nox -s tests -- -m "not processes" tests/unit tests/contracts/golden $(PYTEST_OPTIONS)

## make examples        every other example, on this machine
examples: $(PACKAGE_STAMP) $(HOROVOD_STAMP)
	$(EXAMPLES)

## make test-container  tests over several containers (need a docker daemon; without one they are left out, saying so)
test-container: $(DEV_STAMP) $(HOROVOD_STAMP)
	$(BIN)/nox -s containers -- $(PYTEST_OPTIONS)

## make wheel           what pip and uv make of the wheel beside flytekit, of today's package index
wheel: $(DEV_STAMP)
	$(BIN)/nox -s wheel -- $(PYTEST_OPTIONS)

## make gpu             tests that need a GPU: hangs of NCCL, what a GPU reports, an example (docs/gpu.md)
gpu: $(DEV_STAMP) $(LIBRARIES_STAMP)
	$(BIN)/nox -s gpu -- $(PYTEST_OPTIONS)

## make coverage        the same as `make test`, and which lines and branches are run for which test, in ranks as well
coverage: $(DEV_STAMP) $(LIBRARIES_STAMP) $(HOROVOD_STAMP)
	$(BIN)/nox -s coverage -- $(PYTEST_OPTIONS)

## make mutants         a hundred small changes by chance, and what the tests notice of them (MUTANTS="job --seed 2");
##                      after `make coverage`, by which it knows what to run for each
mutants: $(DEV_STAMP) $(LIBRARIES_STAMP) $(HOROVOD_STAMP)
	$(BIN)/nox -s mutants -- --python $(abspath $(BIN)/python) $(MUTANTS)

## make simulation      200,000 random orders of faults of a job, in virtual time, on all cores: for the night (ORDERS=...)
simulation: $(DEV_STAMP)
	$(BIN)/python -m tests.simulation $(ORDERS) --workers "$$(nproc)"

## make corners         the oldest and the newest versions together, on the Pythons that are here: a smoke subset each
corners: $(DEV_STAMP)
	$(BIN)/nox -s corners

## make matrix          every version that is promised, one after the other (hours), and a table
matrix: $(DEV_STAMP)
	$(BIN)/nox -s matrix

## make lint            ruff: rules and formatting; import-linter: imports point downward; vulture: nothing is unused; words
lint: $(DEV_STAMP)
	$(BIN)/nox -s lint

## make types           mypy, strict
types: $(DEV_STAMP)
	$(BIN)/nox -s types

## make docs            the site of docs/ into build/site, strict, and the schema of .github/workflows
docs: $(DEV_STAMP)
	$(BIN)/nox -s docs

## make constraints     requirements/constraints.txt anew (CONSTRAIN=--upgrade: with the newest versions)
constraints: $(DEV_STAMP)
	$(BIN)/nox -s constraints -- $(CONSTRAIN)

format: $(DEV_STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

## make bench           every benchmark, one after the other (long)
bench: $(DEV_STAMP) $(HOROVOD_STAMP)
	set -e; for benchmark in benchmarks/[!_]*.py; do $(BIN)/python "$$benchmark"; done

## make image           the container image (needs a docker daemon)
image:
	$(PYTHON) scripts/build_image.py $(IMAGE_OPTIONS)

## make clean           remove .venv and everything else that make made here; keeps the Horovod wheel's cache
clean:
	rm -rf $(VENV) build dist demo-output *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# --- what the targets above stand on ----------------------------------------------------------------------------------

$(VENV)/.stamp-venv:
	@command -v $(PYTHON) >/dev/null || { echo "make: no $(PYTHON) on PATH; install Python 3.10-3.12, or: make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 10) <= v < (3, 13) else "make: %s is Python %d.%d, and flytekit 1.16 runs on 3.10, 3.11 and 3.12; choose one: make PYTHON=python3.11" % (sys.executable, *v))'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "make: $(PYTHON) cannot make virtual environments; Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP_INSTALL) pip setuptools wheel
	@touch $@

$(TORCH_STAMP): $(VENV)/.stamp-venv
	@$(BIN)/python scripts/torch_download.py "$(strip $(TORCH))" --disable-pip-version-check -c $(CONSTRAINTS) $(PIP_OPTIONS)
	@echo "make: installing $(TORCH)"
	$(PIP_INSTALL) "$(strip $(TORCH))"
	@rm -f $(VENV)/.stamp-torch*
	@touch $@

$(PACKAGE_STAMP): $(VENV)/.stamp-venv $(TORCH_STAMP) setup.cfg pyproject.toml $(CONSTRAINTS) requirements/build.txt requirements/demo.txt
	@echo "make: installing flytekit and this package"
	$(PIP_INSTALL) -r requirements/build.txt -r requirements/demo.txt
	PYTHONWARNINGS=ignore $(PIP_INSTALL) --no-build-isolation --editable .
	@touch $@

$(HOROVOD_STAMP): $(PACKAGE_STAMP) $(wildcard horovod_build/*.py)
	$(BIN)/python horovod_build/build.py --gpu $(HOROVOD_GPU)
	@touch $@

$(DEV_STAMP): $(PACKAGE_STAMP) requirements/dev.txt
	@echo "make: installing the tools for tests, lint and types"
	$(PIP_INSTALL) -r requirements/dev.txt
	@touch $@

$(LIBRARIES_STAMP): $(DEV_STAMP) requirements/libraries.txt
	@echo "make: installing the libraries that are imported for all ranks in tests"
	$(PIP_INSTALL) --no-deps --upgrade --target $(VENV)/libraries -r requirements/libraries.txt
	@touch $@
