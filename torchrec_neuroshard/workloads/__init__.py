"""Table sets to shard: published models, generators, loaders and task sampling."""
