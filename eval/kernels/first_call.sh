#!/usr/bin/env bash
# The first twenty minutes on a machine with a CUDA GPU: are the kernels right, what do they reach, what should be
# tuned.
#     bash eval/kernels/first_call.sh FOLDER_FOR_RESULTS [right | fast]      (in the repository's root)
# Each half stays below ten minutes: the limits of its steps add up to less than 590 seconds.
# Every step has its own limit, writes its results as they come, and does not stop the next one. Nothing is fetched.
set -u
out=${1:?a folder for results}
part=${2:-all}
case $part in all | right | fast) ;; *) echo "expected right or fast, not $part" >&2; exit 2 ;; esac
mkdir -p "$out"
cache=$(mktemp -d) # not among the results
trap 'rm -rf "$cache"' EXIT
export PYTHONPATH=. PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 QUANTKIT_CACHE=${QUANTKIT_CACHE:-$cache}
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv | tee "$out/gpu.txt"

# most of a test's time is the compiler's: side by side where pytest-xdist is installed
workers=()
python3 -c "import xdist" 2>/dev/null && workers=(-n 12)
tests() { # NAME SECONDS FILES...
  local name=$1 limit=$2
  shift 2
  timeout "$limit" python3 -m pytest -m "gpu and not real" -W default -q --maxfail 20 "${workers[@]}" "$@" \
    >"$out/$name.log" 2>&1
  tail -n 15 "$out/$name.log"
}

if [ "$part" != fast ]; then
# 1. right or wrong
tests kernels 170 tests/gpu/test_triton_linear.py tests/gpu/test_triton_w8a8.py
tests models 240 tests/gpu/test_decode.py tests/gpu/test_generate.py tests/gpu/test_convert.py

# a conversion shaped like 8B: three blocks by the real code, 32 extrapolated (writes 3.5 GB)
timeout 150 python3 eval/kernels/gpu_convert.py --blocks 3 --seconds 60 --out "$out/convert8b.json" 2>&1 | tail -n 60
fi

if [ "$part" != right ]; then
# 2. tuned tiles: what one token costs in every layer of an 8B, then where the targets lie, a large square and a small
# one
timeout 90 python3 eval/kernels/gpu_linear.py --tune --seconds 75 --layers "8B gate_up" "8B down" "8B qkv" \
  --tokens 1 --out "$out/tuned1.json" --tiles "$out/tiles.json" 2>&1 | tail -n 10
timeout 125 python3 eval/kernels/gpu_linear.py --tune --seconds 105 --layers "8B o" "70B o" \
  --tokens 1 16 64 512 2 8 32 128 --out "$out/tuned.json" --tiles "$out/tiles.json" 2>&1 | tail -n 20

# 3. the whole step: int4 against our own bf16 path, one stream, with the tiles that were found
timeout 165 python3 eval/kernels/gpu_decode.py --seconds 125 --out "$out/decode.json" 2>&1 | tail -n 12

# decode attention over packed pages against torch's best in bf16
timeout 75 python3 eval/kernels/gpu_attention.py --seconds 60 --out "$out/attention.json" 2>&1 | tail -n 8

# 4. all shapes with derived or tuned tiles, beside torch's bf16, NF4 and what peers are installed; then int8
# activations
timeout 85 python3 eval/kernels/gpu_linear.py --seconds 70 --out "$out/measured.json" 2>&1 | tail -n 40
timeout 45 python3 eval/kernels/gpu_linear.py --w8a8 --seconds 30 --layers "8B o" "8B gate_up" "70B o" \
  --tokens 1 16 64 256 1024 4096 --out "$out/w8a8.json" 2>&1 | tail -n 20
fi
