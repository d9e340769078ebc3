"""Number formats of 8 and 4 bits with a point: what a code means, which scale a group gets, how activations round."""
