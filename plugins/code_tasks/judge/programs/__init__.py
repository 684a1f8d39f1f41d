"""Programs that run inside a box, on the standard library and pytest alone.

They share their process with code of an agent, so nothing that they say is trusted: see `channel`.
"""
