#!/usr/bin/env bash
# Print the path of a Python this project can use; explain what to do when there is none.
set -euo pipefail

usage() {
    cat <<'TEXT'
Usage: scripts/find_python.sh [--help]

Prints the path of a Python >= 3.12 that has the venv module. Looks, in this order, at
  $PYTHON                        if set, nothing else is tried
  PATH                           python3.12, python3.13, python3.14, python3, python
  pyenv                          $PYENV_ROOT/versions and ~/.pyenv/versions
3.12 comes first because requirements.lock was made with it.
TEXT
}

if [ "${1:-}" = "--help" ] || [ "${1:-}" = "-h" ]; then usage; exit 0; fi

# The same question for every candidate; a pyenv shim of an inactive version fails it.
is_usable() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

absolute() { "$1" -c 'import sys; print(sys.executable)'; }

describe() { "$1" -c 'import sys; print("Python %d.%d.%d" % sys.version_info[:3])' 2>/dev/null || echo "does not run"; }

is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

if [ -n "${PYTHON:-}" ]; then
    if is_usable "$PYTHON"; then absolute "$PYTHON"; exit 0; fi
    echo "PYTHON=$PYTHON cannot be used: $(describe "$PYTHON"); needed is Python >= 3.12 with the venv module." >&2
    exit 1
fi

pyenv_roots=()
for root in "${PYENV_ROOT:-}" "${HOME:-}/.pyenv"; do
    [ -n "$root" ] && [ -d "$root/versions" ] && pyenv_roots+=("$root")
done

candidates=(python3.12 python3.13 python3.14 python3 python)
for root in ${pyenv_roots[@]+"${pyenv_roots[@]}"}; do
    for minor in 12 13 14; do
        while IFS= read -r found; do candidates+=("$found"); done < <(
            ls -d "$root"/versions/3."$minor".*/bin/python 2>/dev/null | sort -rV)
    done
done

without_venv=""
for candidate in "${candidates[@]}"; do
    command -v "$candidate" >/dev/null 2>&1 || continue
    if is_usable "$candidate"; then absolute "$candidate"; exit 0; fi
    if [ -z "$without_venv" ] && is_new_enough "$candidate"; then without_venv="$candidate"; fi
done

{
    if [ -n "$without_venv" ]; then
        echo "Found $without_venv ($(describe "$without_venv")), but it lacks the venv module."
        echo "On Debian or Ubuntu: apt-get install python3-venv python3-dev"
    else
        echo "No Python >= 3.12 found on PATH or in pyenv (python3 is $(describe python3))."
        echo "Install one, for example"
        echo "  Debian 13, Ubuntu 24.04 or later:  apt-get install python3 python3-venv python3-dev"
        echo "  anywhere, with pyenv:              pyenv install 3.12"
    fi
    echo "A Python at another place: make demo PYTHON=/path/to/python3.12"
} >&2
exit 1
