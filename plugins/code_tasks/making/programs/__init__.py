"""Programs that run a package's own suite inside a box, on pytest and the standard library."""
