"""Losses on tensors: they return a scalar, and know no processes or data formats."""
