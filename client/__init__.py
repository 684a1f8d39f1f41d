"""For clients of a training server: hints, pairs and the three-channel step by the Tinker SDK.

Imports neither torch nor Monarch; the SDK (`pip install tinker`) only where its types are made.
"""
