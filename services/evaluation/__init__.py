"""`composer-mesh eval`: held-out episodes of any task, played by any model."""
