"""One file is one on-disk format, a stateless encode/decode pair. Imports core."""
