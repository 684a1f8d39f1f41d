"""Tasks of published packages."""
