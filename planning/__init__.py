"""The layout of a run: its processes, their memory needs, and their placement on hosts."""
