"""Reader: vLLM on a CPU.

Its kernels for weights of few bits on a CPU take 4 bits and 16-bit activations only. With QUANTKIT_OWN_KERNEL=1 a
kernel of this file takes their place: it makes floats of the weights and computes in float32. What is tested then is
vLLM's own reading, its names, its packing and its fused matrices, for every number of bits, without bfloat16's noise.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from reading import serve
from vllm import LLM, SamplingParams
from vllm.model_executor.kernels import linear as kernels
from vllm.model_executor.layers.quantization import auto_gptq
from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig
from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig
from vllm.model_executor.layers.quantization.utils.quant_utils import unpack_quantized_values_into_int32 as unpack
from vllm.platforms import PlatformEnum

OWN = os.environ.get("QUANTKIT_OWN_KERNEL") == "1"


class Dequantizing(kernels.MPLinearKernel):  # type: ignore[misc]
    """Floats of the weights as loaded: codes minus their zero points, times the scales of their groups."""

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        kind = self.config.weight_type
        packed, scales, zeros = self._get_weight_params(layer)
        codes = unpack(packed.data, kind, packed.packed_dim).float()
        codes = codes.t() if packed.input_dim == 0 else codes  # [out, in]
        steps = (scales.data if scales.output_dim == 0 else scales.data.t()).float()  # [out, groups]
        if (
            kind.bias == 0
        ):  # stored, also where an AWQ config says zero_point false: its kernels on GPUs read them then, too
            offsets = unpack(zeros.data, kind, zeros.packed_dim).float()
            offsets = offsets if zeros.output_dim == 0 else offsets.t()
        else:
            offsets = torch.full_like(steps, float(kind.bias))
        size = codes.shape[1] // steps.shape[1]
        spread = [part.repeat_interleave(size, 1) for part in (offsets, steps)]
        layer.floats = torch.nn.Parameter((codes - spread[0]) * spread[1], requires_grad=False)

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.nn.functional.linear(x, layer.floats.to(x.dtype), bias)


def read(folder: str, ids: list[int], new_tokens: int, dtype: str) -> tuple[Any, list[int], dict[str, Any]]:
    """Log-probabilities of the prompt, the whole vocabulary of each token, and greedy tokens behind it."""
    model = LLM(
        folder, max_model_len=128, max_num_seqs=1, max_num_batched_tokens=128, dtype=dtype, enforce_eager=True,
        enable_prefix_caching=False, max_logprobs=-1, seed=0,
    )  # fmt: skip
    asked = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, logprobs=-1, prompt_logprobs=-1)
    done = model.generate({"prompt_token_ids": ids}, asked, use_tqdm=False)[0]
    told = [*done.prompt_logprobs[1:], done.outputs[0].logprobs[0]]
    logs = np.full((len(ids), len(told[0])), np.nan)
    for position, entries in enumerate(told):
        for token, entry in entries.items():
            logs[position, token] = entry.logprob
    return logs, list(done.outputs[0].token_ids), {"own_kernel": True} if OWN else {}


if __name__ == "__main__":
    if OWN:
        kernels._POSSIBLE_KERNELS[PlatformEnum.CPU] = [Dequantizing]
        auto_gptq.verify_marlin_supported = lambda **asked: None  # on a CPU it knows 4 bits only
        for config in (AutoGPTQConfig, AutoAWQConfig):  # its kernels here know no float32; this one does
            config.get_supported_act_dtypes = classmethod(lambda cls: [torch.float32, torch.bfloat16])
    serve(read)
