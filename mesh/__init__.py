"""Where processes are and how bytes move. No training and no tasks."""
