"""Experiment trackers behind one port, each on a thread of its own."""
