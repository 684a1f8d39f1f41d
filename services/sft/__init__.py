"""Supervised fine-tuning: the steps of a run on conversations in place of rollouts."""
