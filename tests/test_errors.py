"""Errors shorten long texts from unknown authors."""

from __future__ import annotations

from torchrec_neuroshard.errors import ConfigError, NeuroShardError


def test_long_texts_lose_their_middle() -> None:
    shown = str(ConfigError(f"table 't': {'x' * 10**6} is none; the way out"))
    assert len(shown) <= 4_000
    assert shown.startswith("table 't': xx")
    assert shown.endswith("xx is none; the way out")
    assert str(NeuroShardError(shown)) == shown
