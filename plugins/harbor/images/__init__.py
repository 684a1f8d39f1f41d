"""OCI images: references, layouts, archives, registries, unpacking and the local store."""
