"""The policy model: its folder, training form, sharding and adapters."""
