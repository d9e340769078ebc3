"""A child process within limits on memory and time: the parent's side, and the child's."""
