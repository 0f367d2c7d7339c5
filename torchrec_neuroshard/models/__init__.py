"""Predict what kernels and collectives take; inference alone."""
