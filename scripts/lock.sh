#!/bin/sh
# Resolve the exact versions anew: lock.sh SCRATCH_VENV LOCK_FILE. The lock file's comment lines are kept.
set -eu
venv=$1 lock=$2
rm -rf "$venv"
sh scripts/venv.sh "$venv"
pip="$venv/bin/python -m pip --quiet --disable-pip-version-check"
echo "==> resolving pyproject.toml's ranges (some minutes)"
$pip install '.[decode,embedded,msk,notify,servers,tracing,docs,dev]' 'hatchling>=1.26,<2' editables
# +cpu, +cu130: the local part names a build, and which build fits is the machine's business.
versions=$($pip freeze --all | grep -viE '^(alphaloop|pip|wheel)( |==)' | sed 's/+[a-z0-9.]*$//' | LC_ALL=C sort -f)
head=$(grep '^#' "$lock")
printf '%s\n%s\n' "$head" "$versions" > "$lock"
rm -rf "$venv"
echo "==> wrote $lock: $(printf '%s\n' "$versions" | wc -l) packages; now run make check and make test"
