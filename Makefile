# make demo: serve a small trained model.   make test: the tests but the slow ones.
# Both create .venv on first use from any Python >= 3.12 (or PYTHON=...).

VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2
PYTEST_ARGS ?=

# The CPU is the default here; JAX_PLATFORMS=cuda make test runs on a GPU.
export JAX_PLATFORMS ?= cpu
# Interpreted Pallas kernels need more host threads than a small machine has cores.
export NPROC ?= 16

.PHONY: demo test faults compile lint format types parity notebooks docs clean
.DEFAULT_GOAL := test

# One stamp per set of extras; a changed pyproject or constraint installs again.
CLI := $(VENV)/.installed-cli
DEV := $(VENV)/.installed-dev
PARITY := $(VENV)/.installed-parity
NOTEBOOKS := $(VENV)/.installed-notebooks
INPUTS := pyproject.toml constraints.txt tools/venv.sh tools/find_python.sh

$(CLI): EXTRAS := cli
$(DEV): EXTRAS := dev
$(PARITY): EXTRAS := dev,parity
$(NOTEBOOKS): EXTRAS := dev,parity,notebooks
$(CLI) $(DEV) $(PARITY) $(NOTEBOOKS): $(INPUTS)
	@tools/venv.sh $(VENV) $(EXTRAS)
	@touch $@

demo: $(CLI)
	@$(BIN)/mla-jax demo

# Of the tests marked slow: all, none, or a number, of which three in a row take a third each.
SLOW ?= none
# Hundreds of tiny programs compile here, each runs once: optimising them costs, and shows nothing.
test: $(DEV)
	@JAX_DISABLE_MOST_OPTIMIZATIONS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --slow $(SLOW) $(PYTEST_ARGS)

# The code broken on purpose, a few times: each time a test must fail. The draw changes with every
# commit; make faults SAMPLE=1000 takes all. Triton's interpreter needs what parity needs.
SAMPLE ?= 6
SEED ?= $(shell git rev-list --count HEAD 2>/dev/null || date +%j)
faults: $(PARITY)
	@$(BIN)/python -m tools.faults --sample $(SAMPLE) --seed $(SEED) --jobs $(WORKERS)

# With CUDA 12 and with CUDA 13; make compile CUDA=12, CUDA=13, or CUDA=turn: one of them by commit.
CUDA ?= 12 13
compile:
	@for cuda in $(CUDA); do \
		tools/compile.sh $$cuda .venv-sm90 -n $(WORKERS) $(PYTEST_ARGS) || exit 1; \
	done

lint: $(DEV)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: $(DEV)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

types: $(DEV)
	@$(BIN)/pyright

# All of them, unless SLOW is a number.
parity: $(PARITY)
	@JAX_DISABLE_MOST_OPTIMIZATIONS=1 $(BIN)/python -m pytest -q -n $(WORKERS) \
		--slow $(SLOW:none=all) tests/parity $(PYTEST_ARGS)

notebooks: $(NOTEBOOKS)
	@JAX_DISABLE_MOST_OPTIMIZATIONS=1 $(BIN)/python -m pytest -q -n $(WORKERS) tests/notebooks \
		$(PYTEST_ARGS)

docs: $(DEV)
	@$(BIN)/python -m tools.docs

clean:
	rm -rf $(VENV) .venv-sm90* build dist .pytest_cache .ruff_cache .hypothesis .parity
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
