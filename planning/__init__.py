"""How a run is laid out: its processes, the memory that they need, and the host of each."""
