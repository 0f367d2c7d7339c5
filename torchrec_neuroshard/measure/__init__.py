"""Measurements of fused kernels and collectives, and files of records."""
