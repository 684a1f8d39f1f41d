"""Tensors in, scalar out. No processes, no data formats."""
