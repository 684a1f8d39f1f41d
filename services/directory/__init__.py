"""The directory of a run: who holds it, what it tells, whether one can go on with it."""
