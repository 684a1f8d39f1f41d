"""One optimizer step on tensors: the channels' losses, their sum, the update."""
