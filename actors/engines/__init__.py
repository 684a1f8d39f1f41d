"""What samples tokens in a generator's process: engines behind one port."""
