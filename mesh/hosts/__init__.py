"""The hosts of a run: workers that serve them, leases that end them, addresses and certificates."""
