"""A run on Kubernetes: its objects, how it is brought there with kubectl, followed and ended."""
