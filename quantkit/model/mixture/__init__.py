"""Mixtures of experts: who routes, how fused experts are laid out, and how they are reached one at a time."""
