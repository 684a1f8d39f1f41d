"""Runs of one config with and without its channels, compared."""
