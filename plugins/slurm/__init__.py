"""Slurm: the batch job of a run, how it is submitted, watched, reached and ended."""
