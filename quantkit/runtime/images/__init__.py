"""Prompts with images: files read, a model's processor applied, what the model gets beside the tokens."""
