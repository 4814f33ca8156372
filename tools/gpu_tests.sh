#!/usr/bin/env bash
# tools/gpu_tests.sh OUT [SECONDS] [pytest arguments]: the suite on a GPU; failures are named at once.
#
# Needs the packages of the extra `dev` on PYTHONPATH. Interpreted kernels and those compiled for
# another GPU are left out: they are the CPU's tests. Tests that need much memory are of groups, each
# of which runs in one process.
set -u
cd "$(dirname "$0")/.."
out=$1 seconds=${2:-500}
shift $(($# < 2 ? $# : 2))
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} XLA_PYTHON_CLIENT_PREALLOCATE=false
timeout "$seconds" python3 -m pytest -v -n 14 --dist loadgroup --tb=short \
    -p no:benchmark -p no:cacheprovider -p tools.failures \
    -k "not interpreted and not interprets and not compiles and not two_thousand" "${@:-tests}" \
    > "$out/gpu_tests.log" 2>&1
grep -E "FAILED|ERROR" "$out/gpu_tests.log" | sort -u
tail -n 1 "$out/gpu_tests.log"
