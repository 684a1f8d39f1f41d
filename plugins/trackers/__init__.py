"""Experiment trackers that get a run's figures."""
