"""The policy channel: its samples, and the loss of its config section."""
