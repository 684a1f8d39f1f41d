"""Comparison of runs of one config with and without its channels."""
