"""Rules on ranks: what follows from them, and what breaks them."""

from __future__ import annotations

from torchrec_neuroshard.costs.placement_rules import PlacementRules

A, B, C, D, E = range(5)
NAMES = ("a", "b", "c", "d", "e")


def test_placed_tables_narrow_the_ranks_of_others() -> None:
    rules = PlacementRules(
        NAMES, 4, {A: (0, 1, 2)}, together=((A, B),), apart=((B, C), (C, D))
    )
    by_colocation = rules.restricted({B: {2}})
    assert by_colocation.ranks(A) == (2,)
    assert by_colocation.ranks(C) == (0, 1, 3)
    assert by_colocation.ranks(D) == (0, 1, 2, 3)
    by_distance = rules.restricted({C: {0, 1}})
    assert by_distance.ranks(A) == (2,)
    assert by_distance.ranks(B) == (2,)
    assert rules.restricted({C: {0, 1, 2, 3}}).ranks(D) == ()


def test_tables_of_which_nothing_is_asked_are_free() -> None:
    rules = PlacementRules(NAMES, 4, {A: (0, 1)}, together=((B, C),), apart=((C, D),))
    assert [table for table in range(5) if rules.is_free(table)] == [E]
    together = {table: rules.colocated_with(table) for table in range(4)}
    assert together == {A: (A,), B: (B, C), C: (B, C), D: (D,)}


def test_violations_are_told() -> None:
    rules = PlacementRules(NAMES, 4, {A: (0, 1)}, together=((A, B),), apart=((C, D),))
    fine = {A: {0}, B: {0}, C: {1, 2}, D: {3}, E: {0, 1, 2, 3}}
    assert rules.violation(fine) is None
    for change, message in [
        ({A: {2}, B: {2}}, "'a' is on rank 2; it may be on ranks 0-1 only"),
        ({B: {1}}, "'a' and 'b' are on ranks 0-1, not together"),
        ({A: {0, 1}, B: {0, 1}}, "'a' is on ranks 0-1; it must be on one"),
        ({D: {2}}, "rank 2 holds both 'c' and 'd'"),
    ]:
        assert message in str(rules.violation(fine | change))
    assert rules.violation({A: {1}, D: {2}}) is None
