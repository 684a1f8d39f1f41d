"""What a rollout worker is made of: routing to generators and environments, lockstep."""
