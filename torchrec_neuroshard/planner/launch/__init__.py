"""What is measured when a job starts, and told to all of its ranks."""
