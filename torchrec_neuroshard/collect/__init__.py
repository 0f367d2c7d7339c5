"""Measuring what fused embedding kernels and collectives cost on this machine."""
