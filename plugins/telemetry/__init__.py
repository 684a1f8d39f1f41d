"""Monarch's telemetry of a run, kept in a process of its own and queried in SQL (docs/tree.md)."""
