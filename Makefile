# Every target sets up its own environment in .venv; the stamp makes the second call quick.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
TIMM   := $(CURDIR)/$(VENV)/timm-for-tests
# Processes of the largest of the three sessions of tests; each takes up to 2 GiB (`make test WORKERS=3`).
WORKERS ?= 2
PIP     = $(BIN)/python -m pip install --quiet --disable-pip-version-check
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_BF16
# Where it is set, every pytest process rewrites and compiles all tests anew: 16 s of CPU to collect them instead of 10.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install demo ray test test-here test-stranger test-timm test-gpu lint docs clean
help:
	@echo "make demo     train the four mechanisms on the embedded data and write the report"
	@echo "make ray      start a Ray of two workers here and compare two mechanisms on it"
	@echo "make test     run all tests"
	@echo "make test-gpu the tests that need a GPU, with the python that PYTHON names (pytest, torch, Triton)"
	@echo "make lint     ruff and mypy"
	@echo "make docs     build the documentation site into site/"
	@echo "make install  create .venv with everything the above need"
	@echo "make clean    remove what the above made"

$(STAMP): pyproject.toml constraints.txt tools/check_environment.py
	@echo "setting up $(VENV) (once; a few minutes)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	$(PIP) -c constraints.txt -e ".[dev]"
	@# for the test that the site builds strictly; where it cannot be had, that test is skipped
	-$(PIP) -c constraints.txt -e ".[docs]"
	@# timm needs torchvision, whose dependencies would replace torch; here it may have no build that fits
	-$(PIP) --no-deps timm torchvision==0.28.0
	$(BIN)/python tools/check_environment.py
	@touch $@

install: $(STAMP)

demo: $(STAMP)
	$(BIN)/cumulant reproduce

ray: $(STAMP)
	$(PIP) -c constraints.txt -e ".[ray]"
	$(BIN)/python -m tools.local_ray

# Three sessions at once, as one alone often waits for processes and servers: the tests here; a stranger's in a fresh
# clone; and those of timm's models, where timm cannot be in the environment and has a place of its own.
test: $(STAMP)
	$(BIN)/python tests/timm_for_tests.py $(TIMM)
	PYTHONPATH=$(TIMM) $(BIN)/python tests/upstream_for_tests.py
	@$(MAKE) --no-print-directory -k -j3 test-stranger test-timm test-here

test-here:
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not stranger"

test-stranger:
	@tools/stranger.sh --with $(VENV) > $(VENV)/stranger.txt 2>&1; status=$$?; \
		echo; echo "a stranger in a fresh clone:"; cat $(VENV)/stranger.txt; exit $$status

test-timm:
	@[ ! -d $(TIMM) ] || { PYTHONPATH=$(TIMM) $(BIN)/python -m pytest -m "timm and not stranger" > $(VENV)/timm.txt 2>&1; \
		status=$$?; echo; echo "tests of timm's models:"; cat $(VENV)/timm.txt; exit $$status; }

test-gpu:
	$(PYTHON) -m tools.test_gpu

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(STAMP)
	$(PIP) -c constraints.txt -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open site/index.html"

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
