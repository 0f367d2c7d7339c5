"""Bundles: make, store and find trained cost models with their provenance."""
