"""How numbers are rounded that are no groups of plain integers: floating-point numbers, their scales, activations."""
