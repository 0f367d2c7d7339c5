"""Helpers of the benchmarks: models to train, ranks, training runs, pages."""
