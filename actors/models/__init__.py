"""The policy as a model: its folder, its form in training, its shards and adapters."""
