# Two commands do everything on a machine with Python >= 3.11 and pip: `make demo` and `make test`.
# `make test EXTRAS=dev,targets` also compiles for accelerators that are not there (1.1 GB of compilers).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS ?= dev
export JAX_PLATFORMS ?= cpu

.PHONY: demo test coverage bench docs notebooks lint format clean

demo: $(VENV)/demo.stamp
	@out=$$(mktemp -d)/answers.jsonl && set -x && \
	$(BIN)/duetto batch examples/prompts.jsonl $$out && \
	$(BIN)/python examples/show_answers.py examples/prompts.jsonl $$out 3

# A file's tests stay in one process: they share engines. One that crashes ends the run: xdist would hang.
test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile --max-worker-restart 0

coverage: $(VENV)/test.stamp
	$(BIN)/python -m pytest -n 2 --dist loadfile --max-worker-restart 0 --cov --cov-report=term

# Beside the peers that are installed: `.venv/bin/pip install -e '.[bench]'` installs all of them (and compiles llama.cpp).
# Flags go into BENCH, as in `make bench BENCH="--quick"`.
bench: $(VENV)/demo.stamp
	$(BIN)/python -m benchmarks $(BENCH)

# The documentation as a site in build/site; signatures are laid out by ruff, which is looked for on the path.
docs: $(VENV)/docs.stamp
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m mkdocs build --strict

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
