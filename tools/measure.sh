#!/usr/bin/env bash
# tools/measure.sh PEERS OUT [SECONDS]: every kernel suite in one go, from one compilation phase.
#
# All processes compile side by side; the first row is timed when the last of them has compiled, then
# one row after the other. Cold, on 16 cores, an H200 needs 30 s to import, 105 s to compile and 220 s
# for 40 rows; what is not timed after SECONDS (400) is left out. PEERS: see benchmarks/decode.py.
set -u
cd "$(dirname "$0")/.."
peers=$1 out=$2 end=${3:-400}
export PYTHONPATH=. XLA_PYTHON_CLIENT_PREALLOCATE=false
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
declare -A jobs=([decode]=10 [prefill]=4 [gather]=2 [chunked_prefill]=3)
everyone=0
for n in "${jobs[@]}"; do everyone=$((everyone + n)); done

for suite in "${!jobs[@]}"; do
    python3 -m benchmarks.run "$suite" --peers "$peers" --jobs "${jobs[$suite]}" \
        --turn "$folder/turn" --everyone "$everyone" --limit $((end - SECONDS)) \
        --out "$out/$suite.json" > "$out/$suite.log" 2>&1 &
done
wait
tail -n 30 "$out"/*.log
