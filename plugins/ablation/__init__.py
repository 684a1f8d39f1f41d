"""Ablation: compares a run with and without its channels."""
