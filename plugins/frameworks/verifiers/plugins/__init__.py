"""Plugins of verifiers, which finds them by the names of their modules."""
