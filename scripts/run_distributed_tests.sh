#!/bin/sh
# Run the distributed checks on this machine's ranks and print a table of what ran.
#
#   scripts/run_distributed_tests.sh [--nproc N] [--backend nccl|gloo] [--share-gpus]
#
# nccl: every rank has a GPU of its own; with --share-gpus ranks share those there are: the same results, slowly. gloo:
# the CPU. Default: nccl with as many ranks as there are GPUs, at most 8, else gloo with 2. On a node of a cluster start
# it once, inside the container of the training runs. Exit status 1 when a check failed; the output of each launch stays
# in the folder that the last line names.
set -eu

here=$(cd "$(dirname "$0")/.." && pwd)
if [ -n "${PYTHON:-}" ]; then python=$PYTHON
elif [ -x "$here/.venv/bin/python" ]; then python=$here/.venv/bin/python
else python=python3; fi
PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" exec "$python" "$here/scripts/run_distributed_tests.py" "$@"
