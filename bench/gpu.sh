#!/usr/bin/env bash
# Everything that needs a GPU, in one call, on a machine with Python, torch (CUDA), pytest,
# matplotlib and this tree. Build elsewhere and pass the wheel, or build here:
#   bench/gpu.sh [wheel] [folder for results]
set -uo pipefail
cd "$(dirname "$0")/.."
wheel=${1:-} results=${2:-bench/results}
if [ -n "$wheel" ]; then
  python3 -m pip install -q --no-deps --target /tmp/site "$wheel"
else
  python3 -m pip install -q --no-build-isolation --no-deps --target /tmp/site .
fi || exit
# Away from the source tree, whose mooncake_kernels has no binaries.
export PYTHONPATH=/tmp/site MOONCAKE_KERNELS_REQUIRE=cuda,triton
mkdir -p "$results" && results=$(cd "$results" && pwd) || exit
root=$PWD status=0
cd /tmp || exit
pytest=(python3 -m pytest -q -p no:cacheprovider --import-mode=append)
# tests/transfer starts those of tests/transfer/gpu, with torch's tensors; likewise of the store.
"${pytest[@]}" "$root/tests/kv" "$root/tests/mask" "$root/tests/attention" "$root/tests/similarity" \
  "$root/tests/hashing" "$root/tests/transfer" "$root/tests/store/test_store_gpu.py" || status=1
for tool in memcheck racecheck initcheck; do
  compute-sanitizer --tool "$tool" --error-exitcode 9 \
    "${pytest[@]}" "$root/tests/kv" -k "(cuda or gpu or tma) and not triton and not compile" -x || status=1
done
# A table of this machine, and all copies once more with "auto" going by it.
python3 -m mooncake_kernels calibrate --json "$results/calibration_gpu.json" || status=1
MOONCAKE_KERNELS_CALIBRATION=$results/calibration_gpu.json \
  "${pytest[@]}" "$root/tests/kv" -k "two_sides or copy_blocks or edges" || status=1
bench() { # name, options
  (cd "$root/bench" && python3 "bench_$1.py" --device cuda --json "$results/$1_gpu.json" "${@:2}") || status=1
}
bench copy_blocks
bench copy_batch
bench copy_plan
bench kv_transforms
bench kv_beside_mm --max-sms 0 32 8
bench mask
bench attention
bench similarity
bench kv_shapes --max-sms 0 8 --repeat 11 --seconds 2
python3 "$root/bench/plot_roofline.py" "$results/kv_shapes_gpu.json" "$results" || status=1
python3 -m mooncake_serving demo --device cuda --json >"$results/demo_gpu.json" || status=1
exit $status
