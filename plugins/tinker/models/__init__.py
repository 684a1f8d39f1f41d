"""Models of the clients of a training server: adapters on a frozen base, or all weights of one."""
