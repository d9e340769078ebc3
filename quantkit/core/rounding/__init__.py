"""How numbers are rounded that are no groups of plain integers: numbers with a point, their scales, activations."""
