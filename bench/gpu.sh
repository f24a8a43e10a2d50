#!/usr/bin/env bash
# Everything that needs a GPU, in one call, on a machine with Python, torch (CUDA), the CUDA toolkit
# and this tree. Build elsewhere and pass the wheel, or build here:
#   bench/gpu.sh [wheel] [folder for results]
# Only what the targets of the copies ask for, in 10 minutes with a wheel, and which of them are met:
#   bench/gpu.sh --targets [wheel] [folder for results]
# Only the tests that need a GPU, by several processes, and transfers of its memory; in 7 minutes:
#   bench/gpu.sh --quick [wheel] [folder for results]
# gpu_needs.py says at the start which packages are missing. Where there is no network, WHEELS names
# a folder of wheels: all of them are installed, without their dependencies.
set -uo pipefail
only=
if [[ ${1:-} = --targets || ${1:-} = --quick ]]; then only=$1 && shift; fi
if [[ ${1:-} = -* || ${2:-} = -* || $# -gt 2 ]]; then
  echo 'usage: bench/gpu.sh [--targets | --quick] [wheel] [folder for results]' >&2 && exit 2
fi
# Paths are relative to where this is called, not to the repository.
wheel=${1:+$(realpath -sm "$1")} results=${2:+$(realpath -sm "$2")}
WHEELS=${WHEELS:+$(realpath -sm "$WHEELS")}
cd "$(dirname "$0")/.."
results=${results:-build/bench}
site=$(mktemp -d) && trap 'rm -rf "$site"' EXIT || exit
export PYTHONPATH=$site PATH=$site/bin:$PATH
if [ -n "$WHEELS" ]; then
  python3 -m pip install -q --no-index --no-deps --target "$site" "$WHEELS"/*.whl || exit
fi
needs=()
if [ -n "$only" ]; then needs+=("$only"); fi
if [ -z "$wheel" ]; then needs+=(--build); fi
python3 bench/lib/gpu_needs.py "${needs[@]}" || exit
# Without --upgrade pip leaves a folder alone that is there, such as one out of WHEELS.
python3 -m pip install -q --no-build-isolation --no-deps --upgrade --target "$site" \
  "${wheel:-.}" || exit
# Away from the source tree, whose mooncake_kernels has no binaries.
export MOONCAKE_KERNELS_REQUIRE=cuda,triton
mkdir -p "$results" && results=$(cd "$results" && pwd) || exit
root=$PWD status=0
cd /tmp || exit
if [ "$only" = --targets ]; then
  # What is cut off by its time leaves the rows that it has, and the others are reported as missing.
  target() { # seconds, bench, file, options
    (timeout -k 5 "$1" python3 "$root/bench/kernels/bench_$2.py" --device cuda --threads 8 \
      --json "$results/targets_$3.jsonl" "${@:4}") || status=1
  }
  rm -f "$results"/targets_*.jsonl
  target 40 copy_plan host --seconds 1
  target 120 kv_shapes d2d --seconds 1 --direction D2D --engine cuda tma --shape llama-8b llama-70b-tp8 mla-bf16 \
    --runs 8192 65536 --pattern random --max-gib 8
  target 180 kv_shapes pcie --seconds 1 --direction H2D D2H --engine cuda tma --max-sms 8 --shape llama-70b-tp8 \
    llama-8b --runs 8192 65536 --pattern random --max-gib 2
  target 100 kv_transforms transforms --seconds 1
  target 100 kv_with_mm mm --direction D2D H2D D2H --max-sms 8 --repeat 3 --max-gib 2
  python3 "$root/bench/lib/gpu_targets.py" "$results" || status=1
  exit $status
fi
pytest=(python3 -m pytest -q -p no:cacheprovider --import-mode=append)
if [ "$only" = --quick ]; then
  # The output of each goes into a file of the results; what each ends with is shown at the end.
  part() { # name, seconds, command
    timeout -k 5 "$2" "${@:3}" >"$results/quick_$1.txt" 2>&1
    echo "exit status $?" >>"$results/quick_$1.txt"
  }
  several=(--timeout 120 -rf --tb short)
  # test_tma, not tma: -k also looks at the attributes of a function, such as pytestmark.
  for tool in memcheck racecheck; do
    part $tool 240 compute-sanitizer --tool $tool --error-exitcode 9 "${pytest[@]}" \
      "$root/tests/kv" -k "(cuda or test_tma) and not triton and not compile" &
  done
  MK_TEST_WORLD=gpu part transfer 200 "${pytest[@]}" -n 4 "${several[@]}" \
    "$root/tests/transfer/gpu" "$root/tests/store/gpu" &
  part serving 200 "${pytest[@]}" "${several[@]}" "$root/tests/serving/test_on_a_gpu.py" &
  part kernels 240 "${pytest[@]}" -n "$(($(nproc) > 10 ? $(nproc) - 6 : 4))" "${several[@]}" \
    "$root/tests/kv" "$root/tests/mask" "$root/tests/attention" "$root/tests/similarity" \
    -k "cuda or gpu or triton or test_tma or copy_engine or two_hop"
  wait
  part bench 120 python3 "$root/bench/transfer/bench_transfer_gpu.py" --device cuda --folder /tmp --repeat 7 \
    --seconds 0.3 --json "$results/transfer_gpu.jsonl"
  for name in memcheck racecheck transfer serving kernels bench; do
    said=$results/quick_$name.txt
    echo "== $name" && tail -n 40 "$said"
    case "$name $(tail -n 1 "$said")" in
      *' 0') ;;
      # A sanitizer goes as far as its time lets it; what it reports begins so.
      *check*' 124') ! grep -v COMPUTE-SANITIZER "$said" | grep '^========= ' || status=1 ;;
      *) status=1 ;;
    esac
  done
  exit $status
fi
# tests/transfer starts those of tests/transfer/gpu, with torch's tensors; likewise of the store.
"${pytest[@]}" "$root/tests/kv" "$root/tests/mask" "$root/tests/attention" "$root/tests/similarity" \
  "$root/tests/hashing" "$root/tests/transfer" "$root/tests/store/test_store_gpu.py" \
  "$root/tests/serving/test_on_a_gpu.py" || status=1
for tool in memcheck racecheck initcheck; do
  select="(cuda or gpu or test_tma) and not triton and not compile"
  # It runs one kernel after the other: one that waits for another would wait forever.
  if [ $tool = initcheck ]; then select="$select and not layer_stream"; fi
  compute-sanitizer --tool "$tool" --error-exitcode 9 "${pytest[@]}" "$root/tests/kv" -k "$select" ||
    status=1
done
# A table of this machine, and all copies once more with "auto" going by it.
python3 -m mooncake_kernels calibrate --json "$results/calibration_gpu.json" || status=1
MOONCAKE_KERNELS_CALIBRATION=$results/calibration_gpu.json \
  "${pytest[@]}" "$root/tests/kv" -k "two_sides or copy_blocks or edges" || status=1
bench() { # file, options
  name=$(basename "$1" .py)
  python3 "$root/bench/$1" --device cuda --json "$results/${name#bench_}_gpu.jsonl" "${@:2}" || status=1
}
bench kernels/bench_copy_blocks.py
bench kernels/bench_copy_batch.py
bench kernels/bench_copy_plan.py
bench kernels/bench_kv_transforms.py
bench kernels/bench_kv_with_mm.py --max-sms 0 32 8
bench kernels/bench_mask.py
bench kernels/bench_attention.py
bench kernels/bench_similarity.py
bench transfer/bench_transfer_gpu.py --folder /tmp
bench kernels/bench_kv_shapes.py --max-sms 0 8 --repeat 11 --seconds 2
python3 "$root/bench/plots/plot_roofline.py" "$results/kv_shapes_gpu.jsonl" "$results" || status=1
python3 -m mooncake_serving demo --device cuda >"$results/demo_gpu.txt" || status=1
exit $status
