"""What was planned, for people to look at."""

from torchrec_neuroshard.report.trace import chrome_trace, write_chrome_trace

__all__ = ["chrome_trace", "write_chrome_trace"]
