"""Inference. Imports core, checkpoint, model and formats; never algorithms, never convert."""
