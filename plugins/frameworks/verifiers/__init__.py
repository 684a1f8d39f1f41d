"""Environments of verifiers 0.4 as workflows. verifiers itself is in an environment of its own."""
