"""TRL's GRPOTrainer with all three channels, and the mesh behind its AsyncGRPOTrainer."""
