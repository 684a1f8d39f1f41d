"""Optimizer steps over the trainer's ranks and the SDPO teachers, and the weights after them."""
