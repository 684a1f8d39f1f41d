"""A workflow: two agents in one episode."""
