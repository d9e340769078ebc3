#!/usr/bin/env bash
# The first ten minutes on a machine with a CUDA GPU: are the kernels right, what do they reach, what should be tuned.
#     bash eval/kernels/first_call.sh FOLDER_FOR_RESULTS
# Every step has its own limit, writes its log at once, and does not stop the next one.
set -u
out=${1:?a folder for results}
mkdir -p "$out"
export PYTHONPATH=. PYTHONUNBUFFERED=1 QUANTKIT_CACHE=${QUANTKIT_CACHE:-$out/cache}
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv | tee "$out/gpu.txt"

# 1. right or wrong (the compiler's work is most of the time)
timeout 170 python3 -m pytest -m gpu -W default -x -q tests/gpu/test_triton_linear.py >"$out/tests.log" 2>&1
tail -n 15 "$out/tests.log"
timeout 60 python3 -m pytest -m "gpu and not real" -W default -q tests/gpu/test_generate.py >"$out/generate.log" 2>&1
tail -n 5 "$out/generate.log"
timeout 90 python3 -m pytest -m "gpu and not real" -W default -q tests/gpu/test_convert.py >"$out/convert.log" 2>&1
tail -n 5 "$out/convert.log"

# 2. tuned tiles where the targets lie: a large square, a small one, and what one token costs everywhere
timeout 200 python3 eval/kernels/gpu_linear.py --tune --seconds 180 --layers "70B o" "8B o" \
  --tokens 1 2 8 16 32 64 128 512 --out "$out/tuned.json" --tiles "$out/tiles.json" 2>&1 | tail -n 20

# 3. all shapes with derived or tuned tiles, beside torch's bf16 and int4
timeout 150 python3 eval/kernels/gpu_linear.py --seconds 130 --out "$out/measured.json" 2>&1 | tail -n 40
rm -rf "$out/cache"
