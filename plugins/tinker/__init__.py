"""The Tinker service: trains and samples models of its clients."""
