"""The command that makes coding tasks of source distributions."""
