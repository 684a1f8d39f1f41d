"""`composer-mesh serve`: the mesh as a training server of the Tinker protocol."""
