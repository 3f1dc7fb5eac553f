#!/usr/bin/env bash
# A stranger's first minutes: a fresh clone, a fresh environment, what must import, then every code block of README and
# docs and every command's example, in fresh interpreters without the tests' settings; the site; the two terminals of
# docs/distributed.md; the demo with --demo. Needs what `make install` needs; about ten minutes. `make test` in a fresh
# clone, which is CI, holds all but the last two.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
git clone --quiet "$here" "$folder/cumulant"
cd "$folder/cumulant"
export ONEDNN_MAX_CPU_ISA=${ONEDNN_MAX_CPU_ISA:-AVX512_CORE_BF16}
make install
.venv/bin/cumulant --version
.venv/bin/cumulant list
.venv/bin/python -c "import cumulant; from transformers import BertModel, ViTModel; print(cumulant.register_transformers())"
timm=$PWD/.venv/timm-for-tests
.venv/bin/python tests/timm_for_tests.py "$timm"
PYTHONPATH=$timm .venv/bin/python tests/upstream_for_tests.py
.venv/bin/python -m pytest -q tests/test_docs.py tests/test_release.py tests/cli/test_examples.py tests/tools/test_check_environment.py
[ ! -d "$timm" ] || PYTHONPATH=$timm .venv/bin/python -m pytest -q -m timm tests/test_docs.py tests/conversion/test_doors.py tests/conversion/test_upstream.py
[ ! -x .venv/bin/mkdocs ] || make docs
# Two terminals of docs/distributed.md: a training by two processes, of which the second terminal kills one.
first=$(grep -m1 '^\.venv/bin/torchrun' docs/distributed.md)
second=$(grep -m1 '^until ' docs/distributed.md)
bash <<< "$first" > two-terminals.log 2>&1 &
bash <<< "$second"  # typed, not given as an argument: its own command line would be found by pgrep
wait $!
grep -q 'exitcode: -9' two-terminals.log
grep 'going on after step' two-terminals.log | tail -1
grep 'top-1' two-terminals.log | tail -1
[ "${1:-}" != --demo ] || make demo
echo "a stranger gets through"
