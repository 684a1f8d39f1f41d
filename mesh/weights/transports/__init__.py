"""Weight transports, each with a sender and a receiver."""
