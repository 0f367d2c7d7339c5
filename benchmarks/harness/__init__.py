"""What the benchmarks share: models to train, ranks, training runs and races."""
