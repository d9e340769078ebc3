"""Bytes on disk: sources, tokenizers, texts, the shard writer. Imports core."""
