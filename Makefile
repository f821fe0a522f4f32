# Every target sets up first; see examples/setup.sh for which environment is used.
SHELL := /bin/bash
# More threads than idle cores make small models many times slower.
export OMP_NUM_THREADS ?= 1
.PHONY: setup test check

setup:
	@bash examples/setup.sh

test:
	@python=$$(bash examples/setup.sh) && $$python -m pytest -q $(PYTEST_ARGS)

check:
	@python=$$(bash examples/setup.sh) && $$python -m ruff check . && $$python -m ruff format --check .
