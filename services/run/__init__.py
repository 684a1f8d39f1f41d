"""One run from its config to its end: its processes, its hosts, and what is taken down after it."""
