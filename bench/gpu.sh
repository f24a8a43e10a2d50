#!/usr/bin/env bash
# Everything that needs a GPU, in one call, on a machine with Python, torch (CUDA), pytest and this
# tree. Build elsewhere and pass the wheel, or build here:
#   bench/gpu.sh [wheel] [folder for results]
set -uo pipefail
cd "$(dirname "$0")/.."
wheel=${1:-} results=$(realpath -m "${2:-bench/results}")
if [ -n "$wheel" ]; then
  python3 -m pip install -q --no-deps --target /tmp/site "$wheel"
else
  python3 -m pip install -q --no-build-isolation --no-deps --target /tmp/site .
fi || exit
# Away from the source tree, whose mooncake_kernels has no binaries.
export PYTHONPATH=/tmp/site MOONCAKE_KERNELS_REQUIRE=cuda,triton
root=$PWD status=0
cd /tmp || exit
pytest=(python3 -m pytest -q -p no:cacheprovider --import-mode=append)
"${pytest[@]}" "$root/tests/kv" "$root/tests/hashing" "$root/tests/transfer" || status=1
for tool in memcheck racecheck initcheck; do
  compute-sanitizer --tool "$tool" --error-exitcode 9 \
    "${pytest[@]}" "$root/tests/kv" -k "(cuda or gpu or tma) and not triton and not compile" -x || status=1
done
# A table of this machine, and all copies once more with "auto" going by it.
python3 -m mooncake_kernels calibrate --json "$results/calibration_gpu.json" || status=1
MOONCAKE_KERNELS_CALIBRATION=$results/calibration_gpu.json \
  "${pytest[@]}" "$root/tests/kv" -k "two_sides or copy_blocks or edges" || status=1
for bench in copy_blocks copy_batch copy_plan; do
  (cd "$root/bench" && python3 "bench_$bench.py" --device cuda --json "$results/${bench}_gpu.json") || status=1
done
python3 -m mooncake_serving demo --device cuda --json >"$results/demo_gpu.json" || status=1
exit $status
