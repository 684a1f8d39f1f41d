"""The controller's scheduling: rollout groups, step building, weight sync and stopping."""
