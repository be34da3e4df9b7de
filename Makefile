# SPDX-License-Identifier: Apache-2.0
# Every target sets up what it needs in $(VENV). Needed on the machine: Python >= 3.11 with pip.
#
#   PYTHON=...    the interpreter for the environment (default: the newest one that runs)
#   VENV=...      where the environment lies (default: .venv)
#   PIP_ARGS=...  more arguments of `pip install`, e.g. 'jax==0.10.0' or '--constraint FILE'
#   ARGS=...      arguments of the program that the target runs, e.g. ARGS='-k channel -x'

VENV ?= .venv
BIN := $(VENV)/bin
PIP_ARGS ?=
ARGS ?=

# Each candidate is run, since a name on PATH may be a version manager's stub that only fails.
IS_USABLE := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for candidate in python3.13 python3.12 python3.11 python3 python; do \
	if $$candidate -c '$(IS_USABLE)' >/dev/null 2>&1; then echo $$candidate; break; fi; done)

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo test lint format docs bench clean

help:
	@echo 'make demo    serve and load a real model; print a table of speed and event-loop gaps'
	@echo 'make test    run the tests'
	@echo 'make lint    check style and types'
	@echo 'make format  apply the style'
	@echo 'make docs    build the documentation into docs/_build/html'
	@echo 'make bench   run the benchmarks'
	@echo 'make clean   remove the environments and everything that was built'

demo: $(VENV)/.installed-examples
	$(BIN)/python -m examples.demo $(ARGS)

test: $(VENV)/.installed-tests
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

lint: $(VENV)/.installed-lint
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/python -m pyright --pythonpath $(BIN)/python

format: $(VENV)/.installed-lint
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

docs: $(VENV)/.installed-docs
	$(BIN)/python -m sphinx -W --keep-going -n -q -b html docs docs/_build/html
	@echo 'Built docs/_build/html/index.html'

bench: $(VENV)/.installed-tests $(VENV)/.installed-benchmarks
	$(BIN)/python -m benchmarks $(ARGS)

clean:
	rm -rf .venv .venv-oldest .venv-newest docs/_build dist
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# An environment whose interpreter no longer runs (removed, upgraded) is made anew.
ifneq ($(shell $(BIN)/python -c 'print("runs")' 2>/dev/null),runs)
.PHONY: $(VENV)/.created
endif

# The second way is for Debian and its kin, whose Python lacks ensurepip without python3-venv.
$(VENV)/.created:
	@test -n '$(PYTHON)' || { echo 'No Python >= 3.11 found: make PYTHON=/path/to/python' >&2; exit 1; }
	@'$(PYTHON)' -c '$(IS_USABLE)' || { echo '$(PYTHON) does not run, or is older than 3.11' >&2; exit 1; }
	@echo "Making $(VENV) with $$('$(PYTHON)' --version)"
	@rm -rf '$(VENV)'
	@'$(PYTHON)' -m venv '$(VENV)' 2>/dev/null || { rm -rf '$(VENV)' \
		&& '$(PYTHON)' -m venv --without-pip '$(VENV)' \
		&& '$(PYTHON)' -m pip --python '$(BIN)/python' install --quiet pip; }
	@touch $@

$(VENV)/.installed-%: pyproject.toml $(VENV)/.created
	@echo 'Installing aiocolocated[$*] into $(VENV) (the first time takes a minute or two)'
	@$(BIN)/python -m pip install --quiet $(PIP_ARGS) --editable '.[$*]'
	@touch $@
