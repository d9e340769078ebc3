"""Kernels of packed linears and of decoding. One file is one kernel family; reference.py is the contract of all."""
