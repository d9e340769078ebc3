"""Blocks of ggml in a GGUF file: where their bits lie, and integer codes as blocks."""
