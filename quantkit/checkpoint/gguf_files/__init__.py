"""GGUF files: the header, what its fields may hold, the model in it, its tokenizer."""
