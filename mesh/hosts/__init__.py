"""Hosts of a run: workers, leases, addresses, certificates, tunnels and the roster."""
