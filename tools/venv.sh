#!/usr/bin/env bash
# tools/venv.sh VENV EXTRAS: create VENV if it is missing and install the package with EXTRAS.
set -euo pipefail
venv=$1
extras=$2
here=$(cd "$(dirname "$0")" && pwd)

if ! "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
    rm -rf "$venv"
    if command -v uv >/dev/null; then
        python=$("$here/find_python.sh" 2>/dev/null) || python=3.12
        uv venv --quiet --python "$python" "$venv"
    else
        python=$("$here/find_python.sh")
        "$python" -m venv "$venv"
    fi
    echo "created $venv with $("$venv/bin/python" --version) ($python)"
fi

echo "installing mla-jax[$extras] into $venv"
if command -v uv >/dev/null; then
    uv pip install --quiet --python "$venv/bin/python" -c constraints.txt -e ".[$extras]"
else
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
        -c constraints.txt -e ".[$extras]"
fi
