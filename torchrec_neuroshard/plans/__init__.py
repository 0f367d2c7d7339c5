"""Saved plans: stored in files, rehearsed, and improved while a job runs."""
