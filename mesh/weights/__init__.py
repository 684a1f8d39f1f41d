"""Versioned weights: their memory layout, their publisher and their receiver."""
