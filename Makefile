# `make demo` and `make test` make .venv on first use and are quick to repeat, offline too.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Two test processes with one thread each: small tensors gain nothing from more.
PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# Compiled test files and modules are kept: compiling them again costs every test process ten seconds.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-slow checks lint types imports unit stats docs format clean

demo: $(VENV)/.installed
	$(BIN)/vitrail train demo

# Static checks run next to the tests. `make stats` prints how many minutes the last run took.
test: $(VENV)/.installed-dev
	@start=$$(date +%s); $(MAKE) --jobs 2 checks unit && $(BIN)/python tools/stats.py --record "make test" $$start

checks: lint types imports

lint: $(VENV)/.installed-dev
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m ruff check .

types: $(VENV)/.installed-dev
	$(BIN)/python -m mypy

imports: $(VENV)/.installed-dev
	$(BIN)/python -c "from importlinter.cli import lint_imports_command as lint; lint()"

unit: $(VENV)/.installed-dev
	$(PYTEST) -m "not slow"

# Studies from end to end, whole trainings, every recipe, subprocesses that are killed.
test-slow: $(VENV)/.installed-dev
	@start=$$(date +%s); $(PYTEST) -m slow && $(BIN)/python tools/stats.py --record "make test-slow" $$start

stats: $(VENV)/.installed-dev
	$(BIN)/python tools/stats.py

# The documentation as a site, below build/site; every link must lead somewhere.
docs: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet --site-dir build/site

format: $(VENV)/.installed-dev
	$(BIN)/python -m ruff format .
	$(BIN)/python -m ruff check --fix .

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

# An installed torch >= 2.10 is used as it is (not that of a virtual environment, which another does not see); otherwise
# pip brings one. Tools are called as modules: what is installed beside that torch has no script in .venv/bin.
$(VENV)/bin/pip:
	$(PYTHON) -m venv $(VENV) $$($(PYTHON) -c "import sys, torch, torchvision; ok = sys.prefix == sys.base_prefix and tuple(map(int, torch.__version__.split('.')[:2])) >= (2, 10); print('--system-site-packages' if ok else '')" 2>/dev/null || true)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	touch $@

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/bin/pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@ $(VENV)/.installed
