#!/usr/bin/env bash
# A stranger's first minutes: a fresh clone, a fresh environment, and there every code block of README and docs, every
# command's example, the wheel and the site (the tests marked `stranger`), in interpreters without the tests' settings.
#
#   tools/stranger.sh            sets up all from nothing; then the two terminals of docs/distributed.md; ten minutes
#   tools/stranger.sh --demo     and `make demo`
#   tools/stranger.sh --with .venv   part of `make test`: the clone's wheel in an environment of its own that borrows
#                                only the dependencies of .venv, which in CI was set up minutes before
#
# The clone has what is committed and the changes that the checkout has in tracked files.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
lender= demo=
while [ $# -gt 0 ]; do
    case $1 in
        --with) lender=$(cd "$2" && pwd); shift 2 ;;
        --demo) demo=yes; shift ;;
        *) echo "stranger.sh takes --with VENV and --demo, not $1"; exit 2 ;;
    esac
done
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if git clone --quiet "$here" "$folder/cumulant"; then
    git -C "$here" diff --binary HEAD | git -C "$folder/cumulant" apply --allow-empty
else
    echo "git cannot clone this checkout: a copy of its files instead"
    mkdir "$folder/cumulant"
    tar -C "$here" --exclude ./.git --exclude ./.venv -c . | tar -C "$folder/cumulant" -x
fi
cd "$folder/cumulant"
unset PYTHONPATH
export ONEDNN_MAX_CPU_ISA=${ONEDNN_MAX_CPU_ISA:-AVX512_CORE_BF16}
timm=${lender:-$PWD/.venv}/timm-for-tests
python=.venv/bin/python
if [ "$lender" ]; then
    "$lender/bin/python" -m venv --without-pip .venv
    "$lender/bin/python" -m hatchling build -t wheel -d "$folder/wheel" > /dev/null
    "$lender/bin/python" -m pip --quiet --disable-pip-version-check --python $python install --no-deps "$folder"/wheel/*.whl
    site='import sysconfig; print(sysconfig.get_path("purelib"))'
    "$lender/bin/python" -c "$site" > "$($python -c "$site")/borrowed.pth"
else
    make install
    $python tests/timm_for_tests.py "$timm"
fi
.venv/bin/cumulant --version
.venv/bin/cumulant list > /dev/null
$python -c "import cumulant; from transformers import BertModel, ViTModel; print(cumulant.register_transformers())"
$python -m pytest -q -p no:cacheprovider -m stranger
[ ! -d "$timm" ] || PYTHONPATH=$timm $python -m pytest -q -p no:cacheprovider -m "stranger and timm"
if [ ! "$lender" ]; then
    # A training by two processes, of which the second terminal kills one.
    first=$(grep -m1 '^\.venv/bin/torchrun' docs/distributed.md)
    second=$(grep -m1 '^until ' docs/distributed.md)
    bash <<< "$first" > two-terminals.log 2>&1 &
    bash <<< "$second"  # typed, not given as an argument: its own command line would be found by pgrep
    wait $!
    grep -q 'exitcode: -9' two-terminals.log
    grep 'going on after step' two-terminals.log | tail -1
    grep 'top-1' two-terminals.log | tail -1
fi
[ ! "$demo" ] || make demo
echo "a stranger gets through"
