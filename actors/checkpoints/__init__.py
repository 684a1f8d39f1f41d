"""What training goes on from: what is in a checkpoint, which are whole, who writes them."""
