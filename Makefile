# Every target sets up first; see examples/setup.sh for which environment is used.
SHELL := /bin/bash
# More threads than idle cores make small models many times slower.
export OMP_NUM_THREADS ?= 1
MKDOCS := mkdocs==1.6.1
.PHONY: setup test check docs

setup:
	@bash examples/setup.sh

# All tests compute on the CPU, except those marked gpu: they come second, where there is a GPU (5: none was chosen).
test:
	@python=$$(bash examples/setup.sh) && CUDA_VISIBLE_DEVICES= $$python -m pytest -q $(PYTEST_ARGS) \
	&& if nvidia-smi -L >/dev/null 2>&1; then $$python -m pytest -q -m gpu $(PYTEST_ARGS) || [ $$? = 5 ]; fi

check:
	@python=$$(bash examples/setup.sh) && $$python -m ruff check . && $$python -m ruff format --check . \
	&& $$python -m pyright --pythonpath $$python

# The pages as a site in build/site; a link that leads nowhere is an error.
docs:
	@python=$$(bash examples/setup.sh) && { $$python -c 'import mkdocs' 2>/dev/null || $$python -m pip install -q $(MKDOCS); } \
	&& $$python -m mkdocs build -q && echo build/site/index.html
