# Every target sets up first; see examples/setup.sh for which environment is used.
SHELL := /bin/bash
.PHONY: setup test check

setup:
	@bash examples/setup.sh

test:
	@python=$$(bash examples/setup.sh) && $$python -m pytest -q $(PYTEST_ARGS)

check:
	@python=$$(bash examples/setup.sh) && $$python -m ruff check . && $$python -m ruff format --check .
