"""What a quantized KV cache costs beside a 16-bit one over the same weights."""
