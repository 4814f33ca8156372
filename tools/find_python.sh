#!/usr/bin/env bash
# Print a Python >= 3.12 that can make virtual environments, or say what is missing.
set -u

usable() {
    "$1" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

shopt -s nullglob
candidates=(
    ${PYTHON:+"$PYTHON"}
    python3.12 python3.13 python3.14 python3 python
    "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python
    /opt/python/3.1[2-9]*/bin/python3 /usr/local/bin/python3.1[2-9]
)
for candidate in "${candidates[@]}"; do
    path=$(command -v "$candidate") || continue
    if usable "$path"; then
        "$path" -c 'import sys; print(sys.executable)'
        exit 0
    fi
done

{
    echo "No usable Python >= 3.12 found. Looked at: ${candidates[*]}"
    echo "Install Python 3.12 with its venv module, or name one: make PYTHON=/path/to/python3.12 ..."
} >&2
exit 1
