"""What a step is made of, and what the controller needs from the world to make it."""
