"""Handlers of the CLI commands; heavy modules are imported only when a command runs."""
