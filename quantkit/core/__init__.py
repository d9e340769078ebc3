"""Tensors and arithmetic. Imports torch only."""
