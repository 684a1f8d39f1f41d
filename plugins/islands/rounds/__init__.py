"""Training in several places over slow links: rounds of outer gradients by an object store."""
