"""Measure fused kernels and collectives, and keep the records."""
