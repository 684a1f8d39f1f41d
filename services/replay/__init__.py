"""Channel 3 in a run: asking, refining, and what comes late."""
