"""The directory of a run: its lock, status, control socket, report and resumability."""
