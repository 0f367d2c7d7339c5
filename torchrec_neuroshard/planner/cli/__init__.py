"""The command lines that plan, and that read plans."""
