"""ap-search: which parallel strategy should train this model on this cluster."""
