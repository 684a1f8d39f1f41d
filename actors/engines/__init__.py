"""Inference engines of a generator's process, behind one interface."""
