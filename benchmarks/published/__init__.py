"""Published timings, and models held against them."""
