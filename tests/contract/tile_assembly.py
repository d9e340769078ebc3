"""Print the assembly of ``gemm_ir.tile`` for the processor that NUMBA_CPU_NAME and NUMBA_CPU_FEATURES name."""

from __future__ import annotations

import os

import llvmlite.binding as llvm


def main() -> None:
    features = llvm.get_host_cpu_features()
    for name in os.environ["NUMBA_CPU_FEATURES"].split(","):
        features[name[1:]] = True
    llvm.get_host_cpu_features = lambda: features
    from numba import int64, njit

    from quantkit.runtime.kernels.numba import gemm_ir

    @njit  # type: ignore[untyped-decorator]
    def call(panel, x, token_bytes, pairs, scales, x_scales, sums):  # type: ignore[no-untyped-def]
        gemm_ir.tile(panel, x, token_bytes, pairs, scales, x_scales, sums)

    call.compile((int64,) * 7)
    print(call.inspect_asm(call.signatures[0]))


if __name__ == "__main__":
    main()
