# quantkit: `make demo` and `make test` are all a newcomer needs. Both set up .venv themselves.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# The CPU build where one is offered, pinned so that every machine tests the same numbers.
TORCH  ?= torch==2.13.0
DEMO   ?= demo-out
# What the extra [cpu] installs, from a wheel. For a Python that has none yet: make CPU_EXTRA= test
CPU_EXTRA ?= 'numba>=0.61'

.PHONY: demo test test-slow test-interop audit lint fetch setup clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet -e '.[dev,gguf,bnb,images]'
	$(if $(CPU_EXTRA),$(BIN)/python -m pip install --quiet --only-binary :all: $(CPU_EXTRA),@echo "CPU_EXTRA is empty: the tests of the CPU kernels are skipped")
	@touch $@

fetch: setup
	$(BIN)/quantkit fetch smollm2-135m
	$(BIN)/quantkit fetch wikipedia-sample

# A real model: original -> 4 bits, what it cost, its size, text that it writes.
demo: fetch
	$(BIN)/python eval/demo.py --out $(DEMO)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Two workers of one thread each: on small models threads mostly wait for each other.
test: lint fetch
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not interop and not gpu" --doctest-modules quantkit tests

# Known vulnerabilities of what is installed, asked from PyPI; what it could not ask about, it says.
audit: setup
	$(PYTHON) -m venv $(VENV)-audit
	$(VENV)-audit/bin/python -m pip install --quiet pip-audit
	$(BIN)/python -m pip freeze --exclude-editable > $(VENV)-audit/installed.txt
	$(VENV)-audit/bin/pip-audit --disable-pip --no-deps --progress-spinner off -r $(VENV)-audit/installed.txt

test-slow: fetch audit
	$(BIN)/quantkit fetch gemma3-270m
	$(BIN)/python -m pytest -m "slow" tests

test-interop: fetch
	$(BIN)/python -m pytest -m "interop" tests

clean:
	rm -rf $(VENV) build dist *.egg-info $(DEMO)
