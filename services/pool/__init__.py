"""What `service.spawn` is made of: replicas, routing, sessions, retries."""
