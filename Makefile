# One word per task. Each prepares what it needs in .venv and is safe to run twice.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help install demo test check bench chaos clean

help:
	@echo "make demo   train a small vision-language model asynchronously on this machine"
	@echo "make test   run the tests"
	@echo "make check  lint and type-check"
	@echo "make chaos  kill learner and servers 100 times at random, and count every prompt"
	@echo "make bench  run the benchmarks and print their tables"

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml scripts/install.sh
	PYTHON="$(PYTHON)" VENV="$(VENV)" bash scripts/install.sh
	@touch $@

demo: install
	$(BIN)/python examples/digits/demo.py

test: install
	$(BIN)/python -m pytest

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

chaos: install
	$(BIN)/python -m tests.chaos --kills 100 --servers 2 3

bench: install
	$(BIN)/python benchmarks/run.py

clean:
	rm -rf $(VENV) runs/demo-*
