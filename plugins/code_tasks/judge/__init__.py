"""Judges work on a coding task: pristine tests in one fresh box, hidden inputs in another."""
