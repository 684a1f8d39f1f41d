"""Boxes in which code of agents runs: bubblewrap behind the port of `tasks.sandbox`."""
