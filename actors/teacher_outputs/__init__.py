"""SDPO teacher outputs for hinted tokens, and their transfer to the trainer's microbatches."""
