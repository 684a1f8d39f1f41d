"""What the commands of the command line do with what was typed; each imports its weight late."""
