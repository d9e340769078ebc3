"""Layouts of FP8, NVFP4 and MXFP4 weights: in compressed-tensors, and as other tools write them (read only)."""
