# make quickstart: from a fresh clone to a table.  make test: what CI runs.  make site: docs/ as pages, build/site.
VENV ?= .venv
PYTHON ?= python3
# For a CPU-only torch from an ordinary index: make quickstart TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check

.PHONY: quickstart test lint site clean

quickstart: $(VENV)/.installed
	$(PY) -m pipelines.run +sweep=quickstart

test: $(VENV)/.dev
	tests/all.sh $(abspath $(PY))

lint: $(VENV)/.dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

site: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict -d build/site

clean:
	rm -rf $(VENV)

# Stamps: a second run installs nothing.
$(VENV)/.created:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.torch: $(VENV)/.created constraints.txt
ifneq ($(TORCH_INDEX),)
	$(PIP) "$$(grep '^torch==' constraints.txt)" --index-url $(TORCH_INDEX)
endif
	touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml constraints.txt
	$(PIP) -c constraints.txt -e '.[experiments,cpu]'
	touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(PIP) -c constraints.txt -e '.[dev,cpu,triton]'
	touch $@
