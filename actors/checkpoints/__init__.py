"""Checkpoints: their contents, their checks, and writing them."""
