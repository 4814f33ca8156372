#!/bin/sh
# tools/sanitize.sh ARGUMENTS: a python run under compute-sanitizer, memory accesses, then races.
#   tools/sanitize.sh -m benchmarks.sanitize [decode] [quantised] [prefill] [cache] [stack] [sparse]
# TOOLS names fewer of the two.
# Every array is an allocation of its own, so that a step over its end is an error.
PATH=$PATH:/usr/local/cuda/bin
export XLA_PYTHON_CLIENT_PREALLOCATE=false XLA_PYTHON_CLIENT_ALLOCATOR=platform
# Under a sanitizer XLA's trials of products take minutes, and its alarm about that crashes.
export XLA_FLAGS="--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false $XLA_FLAGS"
status=0
for tool in ${TOOLS:-memcheck racecheck}; do
  echo "$tool"
  compute-sanitizer --tool $tool --error-exitcode 9 --kernel-name kernel_substring=mla_ \
    "${PYTHON:-python3}" "$@" || status=$?
done
exit $status
