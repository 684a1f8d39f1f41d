"""The durable store of a run: its state in one SQLite file, its traces in a file for each group."""
