"""The SDPO channel: the hinted turns of a step, and how much better the hinted teacher is."""
