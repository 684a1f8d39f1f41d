"""The inputs of a training step, and the ports through which the controller gets them."""
