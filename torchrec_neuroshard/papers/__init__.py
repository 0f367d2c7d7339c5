"""Other people's ways to place tables, behind the same interface."""
