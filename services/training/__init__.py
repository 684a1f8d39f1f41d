"""Optimizer steps over the trainer's ranks and SDPO teachers, checkpoints and weight sync."""
