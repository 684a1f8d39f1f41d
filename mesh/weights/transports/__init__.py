"""The ways that the bytes of a part can take: each with a side that offers and one that fetches."""
