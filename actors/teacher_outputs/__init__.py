"""What SDPO teachers tell of hinted tokens, and its way to the microbatch that needs it."""
