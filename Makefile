# Each target sets up what it needs: a virtual environment in .venv, with the versions of constraints.txt.
#   MOEPDL_VENV=DIR   use or create the environment there
#   PYTHON=python3.12 the interpreter that creates it (3.10 to 3.13)
#   VENV=0            use PYTHON as it is, with whatever torch it has (a GPU machine's own image)
#   ARGS="..."        further arguments: make demo ARGS="--layers 8", make test ARGS="-k route"

PYTHON ?= python3
MOEPDL_VENV ?= .venv
VENV ?= 1

ifeq ($(VENV),0)
PY := PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON)
STAMP :=
else
# Empty is unset: the environment is installed without bytecode (most of it is never imported), and what is imported
# keeps its own, in this process and in the many that the tests start.
PY := PYTHONDONTWRITEBYTECODE= $(MOEPDL_VENV)/bin/python
STAMP := $(MOEPDL_VENV)/.moepdl-installed
endif

.PHONY: help demo test test-full sanitize lint format bench-cpu train clean
help:
	@sed -n '2,/^$$/s/^# \{0,1\}//p' Makefile
	@echo "targets: demo test test-full sanitize lint format bench-cpu train clean"

$(MOEPDL_VENV)/.moepdl-installed: pyproject.toml constraints.txt
	@echo "moepdl: setting up $(MOEPDL_VENV) (minutes the first time)"
	$(PYTHON) -m venv $(MOEPDL_VENV)
	$(MOEPDL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e ".[dev]"
	@touch $@

demo: $(STAMP)
	$(PY) -m moe_compiler.demo $(ARGS)

# One process a core, of one thread each.
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -n auto --dist worksteal

test: $(STAMP)
	$(PYTEST) -m "not slow" $(ARGS)

test-full: $(STAMP)
	$(PYTEST) $(ARGS)

# Through `python -m`: ruff and mypy are the environment's own.
# On a GPU, under compute-sanitizer: three to four minutes.
sanitize: $(STAMP)
	$(PY) -m tests.gpu.sanitize $(ARGS)

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(STAMP)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench-cpu: $(STAMP)
	$(PY) -m benchmarks.cpu_formulations $(ARGS)
	$(PY) -m benchmarks.compile_time

train: $(STAMP)
	$(PY) examples/train_char_moe.py $(ARGS)

clean:
	rm -rf $(if $(filter .venv,$(MOEPDL_VENV)),.venv) build dist *.egg-info out .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
