# `make demo` and `make test` set everything up on a machine with Python 3.11 to 3.13 and a network.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OLDEST := .venv-oldest
STAMP := $(VENV)/.installed
# setuptools warns about every editable installation of a layout like ours; users cannot act on the warning.
QUIET := PYTHONWARNINGS="ignore:Editable installation"
INSTALL := $(QUIET) $(BIN)/python -m pip install --quiet

.PHONY: demo test long exhaustive oldest check lint format docs docs-site parity gpu gpu-plan gpu-validate bench bench-all stranger dist clean

# PASSIVE: threads that wait sleep. Beside a busy process, threads that spin take the processor from those that compute.
demo: $(STAMP)
	rm -rf runs/demo
	OMP_WAIT_POLICY=PASSIVE $(BIN)/fp4graph compare digits-augmented --backend eager \
		--policies bf16,microscaling,tetrajet,tetrajet-qema --seeds 1 --output runs/demo

# Most tests are small: one process per core with one thread each is faster than one process with many threads.
# worksteal: a process that has run its tests takes over tests of the others.
PROCESSES := -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python $(PROCESSES)

test: $(STAMP) lint
	$(PYTEST) --ignore=tests/clients

# Policies, cases, kills and clients that few changes touch, and the code for GPUs; of many cases one in three.
# Continuous integration runs `make test long`.
long: $(VENV)/.clients docs-site
	$(PYTEST) -m "(long or gpu) and not exhaustive and not parity"

# The same with every case: hours.
exhaustive: $(VENV)/.clients docs-site
	$(PYTEST) -m "(long or gpu) and not parity"

# The tests of `make test` on the lowest versions that pyproject.toml allows.
oldest: $(OLDEST)/.installed
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python $(PROCESSES) --ignore=tests/clients

# The inner loop: no test that compiles with Inductor, starts processes or services, or is slow for another reason. The
# ignored folders hold only such tests, and importing them takes seconds.
check: $(STAMP) lint
	$(PYTEST) --ignore=tests/clients --ignore=tests/gpu --ignore=tests/distributed -m "not (inductor or process or service or slow or long or parity or gpu)"

# `ruff format` is not checked here: ruff is not pinned, and a new release may format otherwise.
lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff format .

docs: $(STAMP)
	$(BIN)/python -m fp4graph.commands.reference docs/reference

# Builds the site into runs/site; a broken link is an error. Notebooks run first, for two minutes, if they or the package
# were edited since the last build. Pages open without a server and make no request; only the search needs a server, such
# as python -m http.server --directory runs/site.
docs-site: $(VENV)/.site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

# Compares every policy and technique under Inductor with eager, mixtures of experts too: about an hour and a half.
parity: $(STAMP)
	$(BIN)/python -m pytest tests/parity -m "parity or not parity" -s
	$(BIN)/python -m pytest tests/clients/test_experts.py -m parity

# Measures the CPU targets of docs/performance.md: 10 to 30 minutes, with nothing else running.
bench: $(VENV)/.peers
	$(BIN)/python -m benchmarks.targets

# Every benchmark for every policy: many hours.
bench-all: $(VENV)/.peers
	$(BIN)/python -m benchmarks.targets --everything
	$(BIN)/python -m benchmarks.report

# Interprets all of the GPU code and compiles it to machine code, without a GPU: half an hour.
gpu: $(STAMP)
	$(PYTEST) tests/gpu -m "gpu or not gpu"

# Predicts the cost of policies on a GPU from the program that Inductor writes for it: minutes a policy, without a GPU.
gpu-plan: $(STAMP)
	$(BIN)/python -m benchmarks.gpu.plan --blocks vit-b,deit-tiny,llama-350m

# On a machine with a GPU, without a network: checks bits and parity, and measures times, memory and switches beside the
# prediction. It ends after about seven minutes a part and prints the cases that are left; run it again to continue. Exit
# status 1: a case failed; 2: a requirement of every part is missing (127: the interpreter); 3: cases are left.
GPU_PYTHON ?= python3
gpu-validate:
	@s=0; for part in kernels quantizers parity steps switches; do \
		$(GPU_PYTHON) -m benchmarks.gpu.validate --part $$part; \
		case $$? in 0) ;; 2) exit 2;; 127) exit 127;; 3) test $$s -ne 0 || s=3;; *) s=1;; esac; \
	done; exit $$s

# Installs a wheel of fp4graph and the example plugin package into a new environment, and trains.
stranger: $(STAMP)
	$(BIN)/python examples/technique_plugin/stranger.py

# Builds dist/*.tar.gz and dist/*.whl, and checks what an index would show of them.
dist: $(STAMP)
	rm -rf dist
	$(BIN)/python -m build --quiet
	$(BIN)/python -m twine check --strict dist/*

# Keeps runs/: results and data sets.
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

$(VENV)/.site: $(STAMP)
	$(INSTALL) -e ".[site]"
	touch $@

$(VENV)/.peers: $(STAMP)
	$(INSTALL) -e ".[bench,peers]"
	touch $@
