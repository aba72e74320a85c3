"""Embeddings: texts in, vectors out, paid by the input alone."""
