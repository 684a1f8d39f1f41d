"""Runs in a browser: a live page over run directories, and reports as one file."""
