"""What an error shows of a text that anybody may have written."""

from __future__ import annotations

from torchrec_neuroshard.errors import ConfigError, NeuroShardError


def test_of_a_long_text_the_middle_is_left_out() -> None:
    shown = str(ConfigError(f"table 't': {'x' * 10**6} is none; the way out"))
    assert len(shown) <= 4_000
    assert shown.startswith("table 't': xx")
    assert shown.endswith("xx is none; the way out")
    assert str(NeuroShardError(shown)) == shown
