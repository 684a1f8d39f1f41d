"""Implementation of `service.spawn`: replicas, routing, sessions, retries and placement."""
