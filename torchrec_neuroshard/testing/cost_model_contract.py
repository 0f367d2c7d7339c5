"""Test cases that every `CostModel` must pass.

Shapes: `N` shards, `F` features, `E` encoding values, `S` sets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from torchrec_neuroshard.errors import FeatureSchemaError
from torchrec_neuroshard.models.base import CostModel
from torchrec_neuroshard.tables.features import FEATURE_NAMES
from torchrec_neuroshard.testing.cases import (
    expect_close,
    expect_error,
    sample_features,
)


class CostModelContract(ABC):
    """Test cases that every cost model must pass.

    Derive a class named `Test...` for pytest, or call the `test_` methods. They take no
    arguments and fail with an `AssertionError`.
    """

    tolerance: float = 1e-5
    """Relative difference allowed for rounding."""
    has_ranges: bool = False
    """Whether the model knows its training range and must warn outside it."""

    @abstractmethod
    def make_cost_model(self) -> CostModel:
        """Return the model under test. Cases call this several times."""

    def sample_features(self) -> npt.NDArray[np.float32]:
        """Return the features of the shards to test with, `N x F`; N is at least 4."""
        return sample_features()

    def _sets(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64], int]:
        """Return shards, their sets and the number of sets, 5; the third is empty."""
        features_NF = self.sample_features()
        set_N = np.array([0, 1, 3, 4], dtype=np.int64)[np.arange(len(features_NF)) % 4]
        return features_NF, set_N, 5

    def test_encodings_have_the_stated_shape(self) -> None:
        """`encode` returns `N x E` finite numbers."""
        model, features_NF = self.make_cost_model(), self.sample_features()
        for rows in (features_NF, features_NF[:1]):
            encoded = model.encode(rows)
            wanted = (len(rows), model.encoding_dim)
            assert encoded.shape == wanted, (
                f"encode: shape {encoded.shape}, not {wanted}"
            )
            assert np.isfinite(encoded).all(), "encode: a value is not finite"

    def test_times_are_finite_and_not_negative(self) -> None:
        """This holds for shards, sets and very large sets, pooled or not."""
        model, features_NF = self.make_cost_model(), self.sample_features()
        sums = []
        for encode in (model.encode, model.encode_sequences):
            encoded = encode(features_NF)
            total = encoded.sum(axis=0, keepdims=True)
            sums += [encoded, total, 100 * total]
        sums_SE = np.concatenate(sums)
        costs_S2 = model.predict_sums(sums_SE)
        assert costs_S2.shape == (len(sums_SE), 2), (
            f"predict_sums: shape {costs_S2.shape}, not {(len(sums_SE), 2)}"
        )
        for name, times in zip(("forward", "backward"), costs_S2.T, strict=True):
            wrong = np.flatnonzero(~(np.isfinite(times) & (times >= 0)))
            assert not len(wrong), f"{name} negative or infinite: {times[wrong]} ms"
        assert (costs_S2 > 0).any(), "every set takes 0 ms"

    def test_empty_set_is_free(self) -> None:
        """A set without shards launches no kernel and takes exactly 0 ms."""
        model = self.make_cost_model()
        features_NF, set_N, num_sets = self._sets()
        empty = model.predict_sets(features_NF, set_N, num_sets)[2]
        nothing = model.predict_sums(np.zeros((1, model.encoding_dim)))[0]
        assert not empty.any() and not nothing.any(), (
            f"the empty set takes {empty} ms, a sum of zeros {nothing} ms"
        )

    def test_no_shards_at_all(self) -> None:
        """A call with empty sets returns zeros, a call without sets no rows."""
        model, features_NF = self.make_cost_model(), self.sample_features()
        nobody = np.zeros(0, dtype=np.int64)
        costs_S2 = model.predict_sets(features_NF[:0], nobody, 3)
        assert costs_S2.shape == (3, 2) and (costs_S2 == 0).all(), (
            f"three empty sets take {costs_S2} ms"
        )
        none = model.predict_sums(np.zeros((0, model.encoding_dim)))
        assert none.shape == (0, 2), f"no sets: shape {none.shape}, not (0, 2)"

    def test_order_of_shards_does_not_matter(self) -> None:
        """A set takes the same time in any order of its shards."""
        model = self.make_cost_model()
        features_NF, set_N, num_sets = self._sets()
        order = np.random.default_rng(1).permutation(len(features_NF))
        expect_close(
            model.predict_sets(features_NF[order], set_N[order], num_sets),
            model.predict_sets(features_NF, set_N, num_sets),
            self.tolerance,
            "sets with their shards in another order",
        )

    def test_sets_are_sums_of_encodings(self) -> None:
        """`predict_sets` equals `predict_sums` of the summed encodings."""
        model = self.make_cost_model()
        features_NF, set_N, num_sets = self._sets()
        encoded = np.concatenate([model.encode(row[None]) for row in features_NF])
        sums_SE = np.stack([encoded[set_N == s].sum(axis=0) for s in range(num_sets)])
        expect_close(
            model.predict_sums(sums_SE),
            model.predict_sets(features_NF, set_N, num_sets),
            self.tolerance,
            "predict_sums of summed encodings, against predict_sets",
        )

    def test_other_sets_of_a_call_do_not_matter(self) -> None:
        """One call for many sets gives the same as a call for each."""
        model = self.make_cost_model()
        features_NF, set_N, num_sets = self._sets()
        together = model.predict_sets(features_NF, set_N, num_sets)
        for number in np.unique(set_N):
            rows = features_NF[set_N == number]
            alone = model.predict_sets(rows, np.zeros(len(rows), dtype=np.int64), 1)
            expect_close(
                alone[0],
                together[number],
                self.tolerance,
                f"set {number} alone, against the same set beside other sets",
            )

    def test_wrong_number_of_features_is_refused(self) -> None:
        """One column too few or too many raises a FeatureSchemaError."""
        model, features_NF = self.make_cost_model(), self.sample_features()
        more = np.concatenate([features_NF, features_NF[:, :1]], axis=1)
        for wrong in (features_NF[:, :-1], more):
            expect_error(
                FeatureSchemaError,
                lambda wrong=wrong: model.encode(wrong),  # type: ignore[misc]
                f"{wrong.shape[1]} columns instead of {len(FEATURE_NAMES)}",
            )

    def test_predictions_repeat(self) -> None:
        """A second call, or another model made the same way, gives the same times."""
        first, second = self.make_cost_model(), self.make_cost_model()
        costs = [m.predict_sets(*self._sets()) for m in (first, first, second)]
        for other in costs[1:]:
            assert np.array_equal(other, costs[0]), (
                "a second call with the same sets gives other times"
            )

    def test_arguments_are_left_alone(self) -> None:
        """The model does not write to features or sums."""
        model, features_NF = self.make_cost_model(), self.sample_features()
        kept = features_NF.copy()
        sums_SE = model.encode(features_NF)
        model.range_warnings(features_NF)
        assert (features_NF == kept).all(), "a call changed the features"
        kept_sums = sums_SE.copy()
        model.predict_sums(sums_SE)
        model.relative_uncertainty(sums_SE)
        assert (sums_SE == kept_sums).all(), "a call changed the sums"

    def test_uncertainty_is_a_share(self) -> None:
        """Each set has one finite uncertainty of at least 0."""
        model = self.make_cost_model()
        sums_SE = model.encode(self.sample_features())
        uncertainty_S = np.asarray(model.relative_uncertainty(sums_SE))
        assert (
            uncertainty_S.shape == (len(sums_SE),)
            and (np.isfinite(uncertainty_S) & (uncertainty_S >= 0)).all()
        ), f"relative uncertainties of {len(sums_SE)} sets: {uncertainty_S}"

    def test_range_warnings_name_shard_and_feature(self) -> None:
        """Each warning names one value, and the value is outside the named range."""
        model = self.make_cost_model()
        features_NF = np.concatenate(
            [self.sample_features(), sample_features(4, far_out=True)]
        )
        seen = set()
        for warning in model.range_warnings(features_NF):
            where = (warning.shard, warning.feature)
            assert (
                0 <= warning.shard < len(features_NF)
                and warning.feature in FEATURE_NAMES
                and where not in seen
            ), f"a warning for {where} names an unknown value or repeats itself"
            seen.add(where)
            value = features_NF[warning.shard, FEATURE_NAMES.index(warning.feature)]
            assert (
                warning.value == value
                and not warning.low <= warning.value <= warning.high
            ), (
                f"a warning says that {where} is {warning.value}, outside "
                f"{warning.low} to {warning.high}; it is {value}"
            )
        assert seen or not self.has_ranges, (
            "shards have 10^9 rows, which nobody measured, but there is no warning"
        )

    def test_more_columns_do_not_take_less_time_to_reorder(self) -> None:
        """If known, times are `N x 2`, at least 0, and grow with the bytes."""
        sizes_N: npt.NDArray[np.float64] = 4.0 ** np.arange(21, dtype=np.float64)
        if (ms_N2 := self.make_cost_model().column_order(sizes_N)) is None:
            return
        assert ms_N2.shape == (len(sizes_N), 2), (
            f"column_order: shape {ms_N2.shape}, not {(len(sizes_N), 2)}"
        )
        assert (ms_N2 >= 0).all() and (np.diff(ms_N2, axis=0) >= 0).all(), (
            f"column_order of {sizes_N} bytes takes {ms_N2.tolist()} ms"
        )

    def test_says_what_it_rests_on(self) -> None:
        """Name, hardware and source are not empty, since reports print them."""
        model = self.make_cost_model()
        for field in ("name", "hardware", "source"):
            value = getattr(model, field)
            assert isinstance(value, str) and value.strip(), (
                f"{field} is {value!r}; say what the predictions are based on"
            )
