"""Validation of command arguments and configs before anything is started."""
