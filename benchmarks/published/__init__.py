"""Published timings, and models compared with them."""
