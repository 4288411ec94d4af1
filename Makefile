# `make demo` and `make test` do all set-up on a machine that has Python 3.11-3.13 and a network.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OLDEST := .venv-oldest
STAMP := $(VENV)/.installed
# setuptools tells every editable installation of a layout like ours to beware of folders; nobody can act on that.
QUIET := PYTHONWARNINGS="ignore:Editable installation"
INSTALL := $(QUIET) $(BIN)/python -m pip install --quiet

.PHONY: demo test long oldest check lint format docs parity gpu gpu-plan gpu-validate bench bench-all stranger wheel clean

demo: $(STAMP)
	rm -rf runs/demo
	$(BIN)/fp4graph compare digits-augmented --backend eager \
		--policies bf16,microscaling,tetrajet,tetrajet-qema --seeds 1 --output runs/demo

# Most tests are small: a process for each core, each with one thread, is quicker than one process with many. The slow
# ones, which do not share what fixtures made, begin with the file: whoever is done takes over from the others.
PROCESSES := -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python $(PROCESSES)

test: $(STAMP) lint
	$(PYTEST)

# Every other policy, case, kill and client, and the code for GPUs: with `make test` all that continuous integration runs,
# about an hour.
long: $(VENV)/.clients
	$(PYTEST) -m "long and not parity and not gpu"
	$(PYTEST) tests/gpu -m gpu

# The same tests on the lowest version of everything that pyproject.toml allows.
oldest: $(OLDEST)/.installed
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python $(PROCESSES)

# The inner loop: without what compiles with Inductor, starts processes or services, or is slow for another reason. The
# ignored folders hold nothing else, and importing them takes seconds.
check: $(STAMP) lint
	$(PYTEST) --ignore=tests/clients --ignore=tests/gpu --ignore=tests/distributed -m "not (inductor or process or service or slow or long or parity or gpu)"

# Formatting is not checked here: ruff is not pinned, and a new release's taste should not fail a fresh checkout.
lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff format .

docs: $(STAMP)
	$(BIN)/python -m fp4graph.commands.reference docs/reference

# Every policy and technique under Inductor beside eager, and mixtures of experts: about an hour and a half.
parity: $(STAMP)
	$(BIN)/python -m pytest tests/parity -m "parity or not parity" -s
	$(BIN)/python -m pytest tests/clients/test_experts.py -m parity

# The figures that docs/performance.md promises for a CPU, beside the targets: 10 to 30 minutes, nothing else running.
bench: $(VENV)/.peers
	$(BIN)/python -m benchmarks.targets

# Every benchmark for every policy: many hours.
bench-all: $(VENV)/.peers
	$(BIN)/python -m benchmarks.targets --everything
	$(BIN)/python -m benchmarks.report

# What GPUs run, interpreted and compiled to machine code without one: minutes.
gpu: $(STAMP)
	$(BIN)/python -m pytest tests/gpu -m "gpu or not gpu"

# What policies cost on a GPU by the program that Inductor writes for it: predicted without one, minutes a policy.
gpu-plan: $(STAMP)
	$(BIN)/python -m benchmarks.gpu_plan --blocks vit-b,deit-tiny,llama-350m

# On a machine with a GPU, and no network: bits, parity, times, memory and switches, with the prediction beside them. It ends
# after about seven minutes a part and says what is left; the same command goes on from there. Status 1: a case failed; 3:
# cases are left; 2: something is missing, and would be for every part (127: the interpreter).
GPU_PYTHON ?= python3
gpu-validate:
	@s=0; for part in kernels quantizers parity steps switches; do \
		$(GPU_PYTHON) -m benchmarks.gpu_validate --part $$part; \
		case $$? in 0) ;; 2) exit 2;; 127) exit 127;; 3) test $$s -ne 0 || s=3;; *) s=1;; esac; \
	done; exit $$s

# A technique in a package of its own, installed beside a wheel of this one into a new environment.
stranger: $(STAMP)
	$(BIN)/python examples/technique_plugin/stranger.py

wheel: $(STAMP)
	$(BIN)/python -m build --wheel

# Leaves runs/: results and data sets.
clean:
	rm -rf $(VENV) $(OLDEST) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache

$(STAMP): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "no $(PYTHON) on the PATH: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || { \
		echo "fp4graph needs Python 3.11 to 3.13, not $$($(PYTHON) -V): make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
		echo "$(PYTHON) cannot make virtual environments: install its venv package (Debian: apt-get install python3-venv)"; \
		exit 1; }
	$(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): torch and what comes with it are gigabytes, so this takes minutes the first time"
	$(INSTALL) --upgrade pip
	$(INSTALL) -e ".[vision,test,bench]"
	touch $(STAMP)

$(OLDEST)/.installed: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv --clear $(OLDEST)
	$(QUIET) $(OLDEST)/bin/python -m pip install --quiet --constraint constraints-oldest.txt -e ".[vision,test,bench]"
	touch $@

$(VENV)/.clients: $(STAMP)
	$(INSTALL) -e ".[clients]"
	touch $@

$(VENV)/.peers: $(STAMP)
	$(INSTALL) -e ".[bench,peers]"
	touch $@
