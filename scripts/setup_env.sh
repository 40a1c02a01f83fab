#!/usr/bin/env bash
# Make the virtual environment, install the pinned packages and build the extension; reuse what is there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
    cat <<'TEXT'
Usage: [VENV=DIR|none] [PYTHON=PATH] scripts/setup_env.sh [--help]

VENV    where the virtual environment lives (default .venv). `none`: use PYTHON (default python3) as it is;
        nothing is downloaded, its torch and megatron-core are used, only this package is built and installed.
PYTHON  the Python to make the environment from (default: see scripts/find_python.sh --help)

Done again only for what changed: the packages when requirements.lock changes, the extension when setup.py,
pyproject.toml, csrc/ or the presence of nvcc changes. The full output is in setup.log beside the stamps.
TEXT
}

case "${1:-}" in
    -h | --help) usage; exit 0 ;;
    "") ;;
    *) echo "unknown argument: $1" >&2; usage >&2; exit 2 ;;
esac

VENV="${VENV:-.venv}"
CHANGED=0
PACKAGES=0
say() { echo "[setup] $*"; }
die() { echo "[setup] $*" >&2; exit 1; }

# How many packages are in the environment; not pip, which was there before, nor what packages carry inside them.
unpacked() {
    find "$VENV"/lib/python*/site-packages -maxdepth 1 -name '*.dist-info' ! -name 'pip-*' | wc -l
}

# What the running step is at: packages unpacked so far, or the last line of its output.
where_it_is() {
    local line
    line="$(grep -v '^WARNING' "$LOG" | tail -n 1 | sed 's/^ *//')"
    case "$line" in
        "Installing collected packages"*) echo "$(unpacked) of $PACKAGES packages" ;;
        *) echo "$line" | cut -c 1-90 ;;
    esac
}

# run_step LABEL COMMAND...: output to the log, a sign of life on the terminal, the log's end on failure.
run_step() {
    local label="$1" start=$SECONDS shown=0 pid at
    shift
    say "$label ..."
    echo "== $label: $*" >>"$LOG"
    "$@" >>"$LOG" 2>&1 </dev/null &
    pid=$!
    while kill -0 "$pid" 2>/dev/null; do
        sleep 0.5
        if [ $((SECONDS - start - shown)) -ge 15 ]; then
            shown=$((SECONDS - start))
            at="$(where_it_is)"
            say "  $shown s${at:+: $at}"
        fi
    done
    if ! wait "$pid"; then
        grep -v '^WARNING: Location' "$LOG" | tail -n 25 >&2
        die "failed: $label. The whole output: $LOG"
    fi
}

# fingerprint FILE...: one hash over the contents of files and folders, and over $EXTRA.
fingerprint() {
    EXTRA="${EXTRA:-}" "$PY" - "$@" <<'PY'
import hashlib, os, pathlib, sys
digest = hashlib.sha256((sys.version + os.environ["EXTRA"]).encode())
for root in map(pathlib.Path, sys.argv[1:]):
    files = sorted(p for p in root.rglob("*") if p.is_file()) if root.is_dir() else [root]
    for path in files:
        if path.exists() and "__pycache__" not in path.parts:
            digest.update(path.as_posix().encode() + b"\0" + path.read_bytes())
print(digest.hexdigest())
PY
}

stamp_matches() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }

# Two runs at once (make demo beside make test) must not install into one environment together.
take_turns() {
    command -v flock >/dev/null 2>&1 || return 0
    exec 9>"$STATE/setup.lock"
    if ! flock -n 9; then say "waiting for another set-up to finish"; flock 9; fi
}

use_current_python() {
    PY="$(command -v "${PYTHON:-python3}")" || die "no such Python: ${PYTHON:-python3}"
    "$PY" - <<'PY' || die "VENV=none uses this Python as it is; install what is missing, or leave VENV out."
import importlib.util, sys
if sys.version_info < (3, 12):
    sys.exit(f"[setup] Python >= 3.12 needed, {sys.executable} is {sys.version.split()[0]}")
names = "torch numpy yaml psutil einops tqdm matplotlib pytest pybind11 setuptools ml_dtypes".split()
missing = [name for name in names if importlib.util.find_spec(name) is None]
if importlib.util.find_spec("xdist") is None:
    missing.append("pytest-xdist")
if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
    missing.append("megatron-core")
if missing:
    sys.exit(f"[setup] {sys.executable} has no {', '.join(missing)}")
PY
    say "using $PY as it is"
    STATE="build"
}

make_venv() {
    local base
    case "$VENV" in /*) ;; *) VENV="$PWD/$VENV" ;; esac
    PY="$VENV/bin/python"
    STATE="$VENV"
    if ! "$PY" -c 'import pip' >/dev/null 2>&1; then
        base="$(PYTHON="${PYTHON:-}" scripts/find_python.sh)" || exit 1
        say "making $VENV with $("$base" --version) ($base)"
        "$base" -m venv "$VENV" || die "could not make $VENV"
    elif [ -n "${PYTHON:-}" ]; then
        "$PYTHON" -c 'import sys; print(sys.version_info[:2])' | cmp -s - <("$PY" -c 'import sys; print(sys.version_info[:2])') ||
            die "$VENV exists and was made with another Python; remove it to use PYTHON=$PYTHON"
    fi
}

install_packages() {
    local want stamp="$STATE/stamp-packages"
    want="$(fingerprint requirements.lock)"
    if stamp_matches "$stamp" "$want"; then return; fi
    CHANGED=1
    PACKAGES="$(grep -c '==' requirements.lock)"
    run_step "installing the packages of requirements.lock (about 5 GB on disk; a few minutes)" \
        "$PY" -m pip install --disable-pip-version-check --progress-bar off -r requirements.lock
    echo "$want" >"$stamp"
}

check_compiler() {
    command -v "${CXX:-c++}" >/dev/null 2>&1 || command -v g++ >/dev/null 2>&1 ||
        die "no C++ compiler found. On Debian or Ubuntu: apt-get install build-essential"
    "$PY" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
        die "Python.h is missing for $PY. On Debian or Ubuntu: apt-get install python3-dev"
}

# The package is there, from this folder, and its compiled part is in it.
is_installed() {
    (cd / && "$PY" -c 'import importlib.util as u, os, sys
spec = u.find_spec("megatron_hybrid")
place = spec and spec.submodule_search_locations[0]
sys.exit(not (place and os.path.samefile(place, sys.argv[1]) and any(n.startswith("_C.") for n in os.listdir(place))))
' "$OLDPWD/megatron_hybrid" >/dev/null 2>&1)
}

build_extension() {
    local want stamp="$STATE/stamp-extension" nvcc
    nvcc="$(command -v nvcc || ls "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" 2>/dev/null || true)"
    want="$(EXTRA="$PY ${nvcc:-none}" fingerprint setup.py pyproject.toml csrc)"
    if stamp_matches "$stamp" "$want" && is_installed; then return; fi
    CHANGED=1
    check_compiler
    run_step "building the extension (CPU kernels; CUDA kernels: ${nvcc:-no nvcc found, skipped}; minutes on few cores)" \
        "$PY" -m pip install -v --disable-pip-version-check --no-build-isolation --no-deps -e .
    echo "$want" >"$stamp"
}

report() {
    "$PY" - <<'PY'
import importlib.util, sys
import torch
from importlib.metadata import version
built = [kind for kind, name in (("CPU", "_C"), ("CUDA", "_C_cuda"))
         if importlib.util.find_spec(f"megatron_hybrid.{name}") is not None]
gpus = torch.cuda.device_count()
print(f"[setup] ready: Python {sys.version.split()[0]}, torch {torch.__version__}, megatron-core "
      f"{version('megatron-core')}, kernels: {' and '.join(built) or 'none'}, GPUs: {gpus or 'none'}")
PY
}

if [ "$VENV" = none ]; then use_current_python; else make_venv; fi
mkdir -p "$STATE"
LOG="$STATE/setup.log"
take_turns
: >"$LOG"
if [ "$VENV" != none ]; then install_packages; fi
build_extension
if [ "$CHANGED" = 1 ]; then report; else say "up to date ($PY)"; fi
