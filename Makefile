# Two commands do everything on a fresh machine: `make train` and `make test`.

PYTHON ?= python3
NEWEST ?= $(firstword $(wildcard $(HOME)/.pyenv/versions/3.12.*/bin/python) $(shell command -v python3.12))
DOCS := .mkdocs.yml
SITE := site
VENV := .venv
DRAW := 0
NEWEST_VENV := .venv-newest
# All tests of a file run on one worker, which makes their fixtures and programs once.
# A worker that crashes is not replaced: its successor runs the same test again, or hangs.
PYTEST := -m pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0
PIP := -m pip --disable-pip-version-check install --quiet --editable

export PYTHONPATH := .
# Write bytecode, even if the shell says not to: the tests start hundreds of processes.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: train test test-full test-all test-newest words mutants lint docs screenshots notebooks clean

train: $(VENV)/train.installed
	$(VENV)/bin/python -m recipes.pretrain

test: lint
	$(VENV)/bin/python $(PYTEST)

# The fast lane, and of each slow test one of its slow cases; DRAW=n gives other ones.
test-full: lint
	$(VENV)/bin/python $(PYTEST) -m "slow or not slow" --slow-cases 1 --draw $(DRAW)

# Every case of every test, which takes hours.
test-all: lint
	$(VENV)/bin/python $(PYTEST) -m "slow or not slow"

# Rewrite the snapshots of error messages in tests/__snapshots__; read the diff.
words: $(VENV)/test.installed
	$(VENV)/bin/python $(PYTEST) -m words --snapshot-update

test-newest: $(NEWEST_VENV)/test.installed
	$(NEWEST_VENV)/bin/python $(PYTEST)

# Put one fault after another into copies of the library; the tests must find each.
mutants: $(VENV)/test.installed
	$(VENV)/bin/python -m tests.mutants

lint: $(VENV)/test.installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# Into site/, with warnings as errors and without network.
docs: $(VENV)/docs.installed
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --config-file $(DOCS) \
		--site-dir $(abspath $(SITE))

screenshots: $(VENV)/test.installed $(VENV)/browser.installed
	$(VENV)/bin/python -m tests.screenshots docs/images

# Runs the notebooks of docs/, and stores what they show.
notebooks: $(VENV)/test.installed
	$(VENV)/bin/python -m tests.notebooks docs/notebooks

diagrams: $(VENV)/test.installed
	$(VENV)/bin/python -m tests.diagrams docs/images

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(NEWEST_VENV)/bin/python:
	$(if $(NEWEST),,$(error no Python 3.12 found; say NEWEST=/path/to/python3.12))
	$(NEWEST) -m venv $(NEWEST_VENV)

%/train.installed: pyproject.toml | %/bin/python
	$*/bin/python $(PIP) '.[train]'
	touch $@

%/test.installed: pyproject.toml | %/bin/python
	$*/bin/python $(PIP) '.[test,aot]'
	touch $@

%/docs.installed: pyproject.toml | %/bin/python
	$*/bin/python $(PIP) '.[docs]'
	touch $@

%/browser.installed: pyproject.toml | %/bin/python
	$*/bin/python $(PIP) '.[browser]'
	touch $@

clean:
	rm -rf $(VENV) $(NEWEST_VENV) runs site .pytest_cache .hypothesis .ruff_cache
