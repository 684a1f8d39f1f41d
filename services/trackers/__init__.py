"""What a run sends its figures to: the port of a tracker, its checks and its thread."""
