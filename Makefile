# One word per task. Each prepares what it needs in .venv and is safe to run twice.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SGLANG_VENV := .venv-sglang
# Tests at a time: two fifths of a worker's time are waits for processes, so three workers fill two cores.
# On a GPU one: they would measure each other's memory.
JOBS ?= $(if $(shell command -v nvidia-smi),0,3)

# Tests start many processes: each would compile the code again.
test test-fast test-plugins-alone: export PYTHONDONTWRITEBYTECODE =

.PHONY: help install install-vllm install-sglang demo demo-agent wheel docs test test-fast test-plugins-alone check bench chaos fuzz clean

help:
	@echo "make demo   train a small vision-language model asynchronously on this machine"
	@echo "make demo-agent  train a small agent to look before it reads, on this machine"
	@echo "make wheel  build dist/asyncrl-*.whl"
	@echo "make docs   build the site of docs/ into build/site"
	@echo "make test   run the core's tests on a wheel without plug-ins, then those of plug-ins and docs"
	@echo "make test-fast  run the unit tests, in two minutes"
	@echo "make test-plugins-alone  run the tests of each plug-in on a wheel that has no other"
	@echo "make check  lint code and English, and type-check"
	@echo "make fuzz   send 100,000 mutated messages to each end of the wire, and 20,000 to each decoder"
	@echo "make chaos  kill learner and servers 100 times at random, and count every prompt"
	@echo "make bench  run the benchmarks and print their tables"

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml scripts/install.sh
	PYTHON="$(PYTHON)" VENV="$(VENV)" bash scripts/install.sh
	@touch $@

install-vllm: $(VENV)/installed-vllm

$(VENV)/installed-vllm: $(VENV)/installed
	WITH_VLLM=1 PYTHON="$(PYTHON)" VENV="$(VENV)" bash scripts/install.sh
	@touch $@

install-sglang: $(SGLANG_VENV)/installed

$(SGLANG_VENV)/installed: scripts/install_sglang.sh scripts/requirements_sglang.txt asyncrl_plugins/sglang/kernel_stand_in.py
	PYTHON="$(PYTHON)" VENV="$(SGLANG_VENV)" bash scripts/install_sglang.sh
	@touch $@

demo: install
	$(BIN)/asyncrl demo $(if $(FROM_SCRATCH),--from-scratch)

demo-agent: install
	$(BIN)/python examples/zoom_digit/demo.py $(if $(SEED),--seed $(SEED)) $(if $(CONTROLS),--controls)

# From an empty build/: what an earlier build left there would be packed, too.
wheel: install
	rm -rf build dist
	$(BIN)/python -m pip wheel -q --no-deps --no-build-isolation --wheel-dir dist .
	@ls dist

docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# The core's tests run without the plug-ins, on a wheel that has none; the others run in this folder.
CORE_TESTS := tests/unit tests/system tests/gpu
test: install-vllm install-sglang
	$(BIN)/python scripts/core_tree.py build/core
	cd build/core && .venv/bin/python -m pytest -n $(JOBS) $(CORE_TESTS)
	$(BIN)/python -m pytest -n $(JOBS) tests $(CORE_TESTS:%=--ignore=%)

PLUGINS := $(patsubst asyncrl_plugins/%/__init__.py,%,$(wildcard asyncrl_plugins/*/__init__.py))
test-plugins-alone: $(PLUGINS:%=test-alone-%)

test-alone-%: install-vllm install-sglang
	$(BIN)/python scripts/core_tree.py build/$* --plugin $*
	cd build/$* && .venv/bin/python -m pytest -n $(JOBS) tests/plugins/$*

test-fast: install
	$(BIN)/python -m pytest -n $(JOBS) tests/unit

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/lint_english.py
	$(BIN)/pyright

chaos: install
	$(BIN)/python -m tests.rigs.chaos --kills 100 --servers 2 3

bench: install
	$(BIN)/python benchmarks/run.py

fuzz: install
	$(BIN)/python -m tests.rigs.fuzz_wire --messages 100000 --seed 1
	$(BIN)/python -m tests.rigs.hostile_decoders --inputs 20000 --seed 1 --attacks

clean:
	rm -rf $(VENV) $(SGLANG_VENV) runs/demo-*
