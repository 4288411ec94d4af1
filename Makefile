# `make demo` and `make test` do all set-up on a machine that has Python 3.11-3.13 and a network.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint wheel clean

demo: $(STAMP)
	$(BIN)/python examples/pretrain_vit.py --data digits --backend eager \
		--policies bf16,microscaling,tetrajet,tetrajet-qema --output runs/demo

test: $(STAMP) lint
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy

wheel: $(STAMP)
	$(BIN)/python -m build --wheel

clean:
	rm -rf $(VENV) build dist *.egg-info runs

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
		|| { echo "fp4graph needs Python 3.11 to 3.13: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV) || { echo "python3 -m venv failed: install your system's python3-venv package"; exit 1; }
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e ".[vision,test]"
	touch $(STAMP)
