#!/usr/bin/env bash
# The first twenty minutes on a machine with a CUDA GPU: are the kernels right, what do they reach, what should be tuned.
#     bash eval/kernels/first_call.sh FOLDER_FOR_RESULTS [right | fast]
# Each half stays below ten minutes.
# Every step has its own limit, writes its log at once, and does not stop the next one.
set -u
out=${1:?a folder for results}
part=${2:-all}
mkdir -p "$out"
export PYTHONPATH=. PYTHONUNBUFFERED=1 QUANTKIT_CACHE=${QUANTKIT_CACHE:-$out/cache}
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv | tee "$out/gpu.txt"

if [ "$part" != fast ]; then
# 1. right or wrong (the compiler's work is most of the time)
timeout 150 python3 -m pytest -m gpu -W default -x -q tests/gpu/test_triton_linear.py >"$out/tests.log" 2>&1
tail -n 15 "$out/tests.log"
timeout 50 python3 -m pytest -m "gpu and not real" -W default -q tests/gpu/test_generate.py >"$out/generate.log" 2>&1
tail -n 5 "$out/generate.log"
timeout 70 python3 -m pytest -m "gpu and not real" -W default -q tests/gpu/test_convert.py >"$out/convert.log" 2>&1
tail -n 5 "$out/convert.log"
timeout 200 python3 -m pytest -m "gpu and not real" -W default -q tests/gpu/test_decode.py >"$out/decode.log" 2>&1
tail -n 15 "$out/decode.log"

# a conversion shaped like 8B: three blocks by the real code, 32 extrapolated (writes 3.5 GB)
timeout 110 python3 eval/kernels/gpu_convert.py --blocks 3 --seconds 45 --out "$out/convert8b.json" 2>&1 | tail -n 60
fi

if [ "$part" != right ]; then

# 2. tuned tiles where the targets lie: a large square, a small one, and what one token costs everywhere
timeout 170 python3 eval/kernels/gpu_linear.py --tune --seconds 150 --layers "70B o" "8B o" \
  --tokens 1 2 8 16 32 64 128 512 --out "$out/tuned.json" --tiles "$out/tiles.json" 2>&1 | tail -n 20

# 3. the whole step: int4 against our own bf16 path, one stream, with the tiles that were found
timeout 220 python3 eval/kernels/gpu_decode.py --seconds 170 --out "$out/decode.json" 2>&1 | tail -n 12

# 4. all shapes with derived or tuned tiles, beside torch's bf16, NF4 and what peers are installed; then int8 activations
timeout 120 python3 eval/kernels/gpu_linear.py --seconds 100 --out "$out/measured.json" 2>&1 | tail -n 40
timeout 40 python3 eval/kernels/gpu_linear.py --w8a8 --seconds 25 --layers "8B o" "8B gate_up" "70B o" \
  --tokens 1 16 64 256 1024 4096 --out "$out/w8a8.json" 2>&1 | tail -n 20
fi
rm -rf "$out/cache"
