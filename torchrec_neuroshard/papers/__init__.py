"""Published placement methods and baselines, as searchers of this package."""
