"""The replay channel: preference pairs as ids, and the loss of its config section."""
