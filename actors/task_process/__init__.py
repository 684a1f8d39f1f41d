"""The process in which an environment actor runs its task's code."""
