#!/usr/bin/env bash
# A stranger's first minutes: a fresh clone, a fresh environment, the imports, then the code of README and docs and the
# examples of every command, each in a fresh interpreter. Needs what `make install` needs; about five minutes.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
git clone --quiet "$here" "$folder/cumulant"
cd "$folder/cumulant"
export ONEDNN_MAX_CPU_ISA=${ONEDNN_MAX_CPU_ISA:-AVX512_CORE_BF16}
make install
.venv/bin/cumulant --version
.venv/bin/python -c "import cumulant; from transformers import BertModel, ViTModel; print(cumulant.register_transformers())"
.venv/bin/python -m pytest tests/test_docs.py tests/cli/test_examples.py
echo "a stranger gets through"
