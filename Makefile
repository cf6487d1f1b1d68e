# Two commands do everything on a machine with Python >= 3.11 and pip: `make demo` and `make test`.
# `make test EXTRAS=dev,targets` also compiles for accelerators that are not there (1.1 GB of compilers).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS ?= dev
WORKERS ?= auto
COVERED ?= test
export JAX_PLATFORMS ?= cpu
export PWD := $(CURDIR)

.PHONY: demo kernels test test-full repetitions durations coverage mutants bench docs packages notebooks lint format clean

demo: $(VENV)/demo.stamp
	@out=$$(mktemp -d)/answers.jsonl && set -x && \
	$(BIN)/duetto batch examples/prompts.jsonl $$out && \
	$(BIN)/python examples/show_answers.py examples/prompts.jsonl $$out 3

# Linters are tests too, and the type checker is a repetition. One that crashes ends the run: xdist would hang.
# Tests of several devices have a run of their own, since a process has one number of them.
RUN := $(BIN)/python
PYTEST := $(RUN) -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder --max-worker-restart 0
DEVICES := XLA_FLAGS=--xla_force_host_platform_device_count=4
test: $(VENV)/test.stamp
	$(PYTEST) --ignore tests/devices
	$(DEVICES) $(PYTEST) tests/devices

# The CPU kernels for every instruction set, beside their sources: a first start has those of its processor only.
kernels: $(VENV)/test.stamp
	$(BIN)/python -m duetto.cpu_kernels.build

# Those and their repetitions: each family with each layout, each model with each tier.
test-full: test repetitions

repetitions: $(VENV)/test.stamp
	$(PYTEST) --ignore tests/devices -m full
	$(DEVICES) $(PYTEST) tests/devices -m full

# What each test costs: CPU and clock, by room and by file.
durations: $(VENV)/test.stamp
	$(PYTEST) --ignore tests/devices --full --costs benchmarks/results/suite.json
	$(DEVICES) $(PYTEST) tests/devices --full --costs benchmarks/results/suite-devices.json
	$(BIN)/python tests/suite/costs.py benchmarks/results/suite.json benchmarks/results/suite-devices.json

# The lines that `make test` runs, in servers too; COVERED=test-full has the repetitions besides.
coverage: $(VENV)/test.stamp
	$(BIN)/coverage erase
	$(MAKE) $(COVERED) RUN="$(BIN)/coverage run"
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --precision 1

# What the tests prove: seeded changes of the library, each tested by the tests that `make coverage` saw run its
# line. Hours; a run that is interrupted goes on. MUTANTS="--count 50 --folders kvcache" draws fewer.
mutants: $(VENV)/test.stamp
	$(BIN)/python tests/suite/mutants.py $(MUTANTS)

# Beside the peers that are installed: `.venv/bin/pip install -e '.[bench]'` installs all of them (and compiles llama.cpp).
# Flags go into BENCH, as in `make bench BENCH="--quick"`.
bench: $(VENV)/demo.stamp
	$(BIN)/python -m benchmarks $(BENCH)

# The documentation as a site in build/site; signatures are laid out by ruff, which is looked for on the path.
docs: $(VENV)/docs.stamp
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m mkdocs build --strict

# Builds the source distribution and the wheel, and tests the wheel in environments of its own, in another folder.
packages: $(VENV)/test.stamp
	.ci/packages $(BIN)/python

# Runs the notebooks and stores them with their outputs.
notebooks: $(VENV)/test.stamp
	$(BIN)/python notebooks/store.py

lint: $(VENV)/test.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

format: $(VENV)/test.stamp
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# A stamp is newer than pyproject.toml as long as nothing has to be installed again.
$(VENV)/demo.stamp: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/test.stamp: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$(EXTRAS)]'
	touch $(VENV)/demo.stamp $@

$(VENV)/docs.stamp: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	touch $(VENV)/demo.stamp $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache
