"""Channel 3 without a mesh: stored traces to preference pairs."""
