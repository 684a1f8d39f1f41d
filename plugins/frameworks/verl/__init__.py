"""verl 0.9.1 with three channels: estimator, policy losses, agent loop and steps (docs/verl.md)."""
