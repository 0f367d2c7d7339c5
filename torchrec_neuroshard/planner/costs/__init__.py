"""What shards, kernels, collectives and whole plans take: time and memory."""
