"""A policy is evaluated by real processes without a trainer, and what is stored is not played again."""
