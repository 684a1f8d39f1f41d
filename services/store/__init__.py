"""Durable store of a run: its state in one SQLite file, its traces in one file per group."""
