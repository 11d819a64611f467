#!/bin/sh
# Make a virtual environment: venv.sh FOLDER. PYTHON names an interpreter; else the first that is new enough.
set -eu
folder=$1
if [ -x "$folder/bin/python" ] && "$folder/bin/python" -c '' 2>/dev/null; then
    echo "==> virtual environment $folder: there"
    exit 0
fi
found=
# 3.11 first: the lock file was resolved and tested with it.
for python in ${PYTHON:-python3.11 python3 python3.12 python3.13 python}; do
    if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        found=$python
        break
    fi
done
if [ -z "$found" ]; then
    echo "error: expected Python 3.11 or newer, found ${PYTHON:-$(python3 --version 2>/dev/null || echo none)}" >&2
    echo "hint: install Python 3.11, or name one: make PYTHON=/path/to/python3.11 demo" >&2
    exit 1
fi
echo "==> virtual environment $folder with $("$found" --version) ($(command -v "$found"))"
if ! "$found" -m venv --clear "$folder"; then
    echo "error: $found cannot make a virtual environment" >&2
    echo "hint: Debian and Ubuntu keep it in a package of its own: apt install python3-venv" >&2
    exit 1
fi
