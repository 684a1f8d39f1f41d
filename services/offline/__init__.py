"""Teacher replay without a mesh: stored traces to preference pairs."""
