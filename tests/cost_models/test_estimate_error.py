"""What a card may really be: errors of the estimate, and draws from them."""

from __future__ import annotations

import numpy as np

from torchrec_neuroshard.cost_models.estimate_error import (
    CHECKED_CARDS,
    LOG_STD,
    EstimateError,
)


def test_errors_say_what_was_checked() -> None:
    assert str(EstimateError(card="mi300x")).endswith("never checked on this one")
    assert "on this one, forward 14% and backward 9%" in str(
        EstimateError(card="a100-40gb")
    )
    # A card's own residual is not among the others'.
    worst = max(CHECKED_CARDS, key=lambda c: CHECKED_CARDS[c].backward_error or 0)
    own, error = CHECKED_CARDS[worst], EstimateError(card=worst)
    assert own is error.checked and own.backward_error is not None
    assert error.backward < own.backward_error


def test_draws_repeat_and_have_the_stated_spread() -> None:
    error = EstimateError(card="b200")
    draws = error.draw(4_000, seed=1)
    assert draws == error.draw(4_000, seed=1) != error.draw(4_000, seed=2)
    logs = np.log([[getattr(d, n) for n in LOG_STD] for d in draws])
    stated = list(LOG_STD.values())
    np.testing.assert_allclose(logs.std(axis=0), stated, rtol=0.05)
    np.testing.assert_allclose(np.corrcoef(logs.T), np.eye(5), atol=0.05)
