#!/bin/sh
# tools/sanitize.sh TESTS: device tests under compute-sanitizer, memory accesses first, then races.
#   tools/sanitize.sh tests/pallas/test_cache_io_mosaic.py -k little
# Every array is an allocation of its own, so that a step over its end is an error.
set -e
PATH=$PATH:/usr/local/cuda/bin
export XLA_PYTHON_CLIENT_PREALLOCATE=false XLA_PYTHON_CLIENT_ALLOCATOR=platform
for tool in memcheck racecheck; do
  echo "$tool"
  compute-sanitizer --tool $tool --error-exitcode 9 --kernel-name kernel_substring=mla_ \
    "${PYTHON:-python3}" -m pytest -q -m gpu -p no:cacheprovider "$@"
done
