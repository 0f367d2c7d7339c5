"""Plans that exist: stored in files, rehearsed, improved while a job runs."""
