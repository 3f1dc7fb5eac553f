# Every target sets up its own environment in .venv; the stamp makes the second call quick.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_BF16

.PHONY: help install demo test lint docs clean
help:
	@echo "make demo     train the four mechanisms on the embedded data and write the report"
	@echo "make test     run all tests"
	@echo "make lint     ruff and mypy"
	@echo "make docs     build the documentation site into site/"
	@echo "make install  create .venv with everything the above need"
	@echo "make clean    remove what the above made"

$(STAMP): pyproject.toml constraints.txt
	@echo "setting up $(VENV) (once; a few minutes)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@# timm needs torchvision, whose dependencies would replace torch; without both, the tests of timm models are skipped
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps timm torchvision==0.28.0
	@touch $@

install: $(STAMP)

demo: $(STAMP)
	$(BIN)/cumulant reproduce

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html"

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
