"""Learned and physical models of what sharded embeddings cost."""
