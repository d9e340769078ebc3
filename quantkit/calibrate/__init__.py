"""Text -> token batches -> statistics. Imports core, checkpoint and model."""
