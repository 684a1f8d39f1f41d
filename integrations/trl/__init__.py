"""TRL's GRPOTrainer with all three channels, tasks of ours as its rollouts, and pairs for it."""
