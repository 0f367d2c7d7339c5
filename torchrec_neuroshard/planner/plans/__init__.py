"""Plans that are there: stored, rehearsed, mended, for groups of ranks."""
