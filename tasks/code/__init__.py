"""Coding tasks: repositories with a feature missing, and how work on them is judged."""
