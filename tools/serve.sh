#!/usr/bin/env bash
# tools/serve.sh VLLM OUT [steps|one]: serving and routed experts beside vLLM, one machine, one run.
#
# VLLM is the folder that shared/peers/vllm/get.sh fills. vLLM's two expert configurations run first,
# each in a process of its own (150 and 95 s on an H200 with 16 cores), then its fused experts (35 s),
# ours (100 s) and our engine (150 s). OUT gets one JSON file of each; what fails is left out.
# Every row is the median of three runs. With "steps" the experts alone are left out. "one" runs
# decodes of one request alone, beside vLLM's default configuration, which is its faster one there.
set -u
cd "$(dirname "$0")/.."
vllm=$1 out=$2 what=${3:-all}
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} XLA_PYTHON_CLIENT_PREALLOCATE=false OUT=$out/vllm
mkdir -p "$OUT"
if [ "$what" = one ]; then
    bash "$vllm/go.sh" full 200 --slope '' --reps 3 --decode 1x4096,1x32768 --prefill ''
    timeout 200 python3 -m benchmarks.run serve --peers "$OUT" --out "$out/serve.json" \
        --cases v2_lite_27l_decode_1x4096 v2_lite_27l_decode_1x32768
    exit
fi
bash "$vllm/go.sh" full 200 --slope '' --reps 3
bash "$vllm/go.sh" full_n1280 200 --slope '' --reps 3 --moe-config n1280
if [ "$what" != steps ]; then
    PYTHONPATH=.:/tmp/b/fix:/tmp/b/tree:/tmp/b/site timeout 60 \
        python3 -m benchmarks.vllm_experts "$out/vllm_experts.json"
    timeout 130 python3 -m benchmarks.experts --first --limit 115 --out "$out/experts.json" \
        --beside "$out/vllm_experts.json"
fi
cases=$(python3 -c 'from benchmarks.serve import *; print(*(c.name for c in CASES + PREFILLS if c.layers == 27))')
# shellcheck disable=SC2086
timeout 240 python3 -m benchmarks.run serve --peers "$OUT" --cases $cases --out "$out/serve.json"
