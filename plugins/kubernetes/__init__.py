"""Kubernetes: a run's objects, and how it is launched with kubectl, followed and ended."""
