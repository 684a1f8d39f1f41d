"""Processes that start in a tenth of a second: they are forked from one that has imported torch."""
