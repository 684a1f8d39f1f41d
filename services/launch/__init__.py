"""Bringing a run to its hosts: what starts it there, what finds it again, what ends it."""
