"""HTTP as all servers here use it: sockets, access, limits, bodies, options."""
