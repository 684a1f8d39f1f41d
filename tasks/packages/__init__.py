"""Tasks of published packages, played offline (docs/task-packages.md)."""
