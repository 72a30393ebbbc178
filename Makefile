# Every target works from a bare checkout: it needs Python 3.11 or later, pip and make.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready

.PHONY: demo test test-gpu check bench docs clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $(READY)

demo: $(READY)
	$(BIN)/penstock run examples/digits.py

# Two tests at a time: each is mostly one thread.
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup

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

clean:
	rm -rf .venv .penstock build dist src/*.egg-info
