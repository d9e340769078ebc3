"""Which matrices of a block are linears to quantize, and which stay in 16 bit."""
