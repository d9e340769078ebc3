"""One file is one algorithm, a pure function on tensors. Imports core."""
