"""Short offers that a judge grades at once, and readers later."""
