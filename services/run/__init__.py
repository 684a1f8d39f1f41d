"""One run from config to shutdown: its processes, hosts, placement, status and resume state."""
