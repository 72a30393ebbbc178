# Every target works from a bare checkout: it needs Python 3.11 or later, pip and make.
PYTHON ?= python3
BIN := .venv/bin
DEMO := .venv/demo
READY := .venv/ready

# Torch for CUDA brings gigabytes of NVIDIA's libraries: a machine without its driver gets torch for the CPU.
CPU := $(if $(shell command -v nvidia-smi),,--retries 1 --extra-index-url https://download.pytorch.org/whl/cpu)

# No test, bench or demo may set a device's power limit.
export PENSTOCK_OBSERVE_ONLY := 1

.PHONY: demo test test-gpu check bench docs wheel clean

# What the demo needs: Penstock itself, and scikit-learn for its digits.
$(DEMO): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --no-deps $(CPU) torch==2.13.0
	$(BIN)/pip install --quiet -c constraints.txt -e . scikit-learn
	touch $(DEMO)

# What tests, checks and benches need too.
$(READY): $(DEMO)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $(READY)

demo: $(DEMO)
	$(BIN)/penstock run examples/digits.py

# Three processes on two cores: one of them has the Ray clusters, and mostly waits for these. Python keeps what it has
# compiled: a hundred processes import the same modules, and each would compile them again.
test: $(READY)
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3

# On a machine with a GPU: kernels run there, and not in Triton's interpreter.
test-gpu: $(READY)
	$(BIN)/python -m pytest tests/training

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python bench/engine.py

docs: $(READY)
	$(BIN)/python docs/make_api.py

wheel:
	rm -rf build dist
	$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir dist .

clean:
	rm -rf .venv .penstock build dist src/*.egg-info
