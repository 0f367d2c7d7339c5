"""Make, store and find bundles: trained cost models with their provenance."""
