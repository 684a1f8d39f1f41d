"""Inspection of a run's rollouts: list, show, export."""
