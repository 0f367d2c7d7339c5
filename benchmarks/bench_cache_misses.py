"""Predicted and counted misses of FBGEMM's caches of rows (`fused_uvm_caching`).

    python benchmarks/bench_cache_misses.py --tables real_tables.json --out misses

writes `<out>.json` and `<out>.md` after every stream; `--resume` goes on where an
earlier call stopped. Ids are drawn independently, by power laws and by
the access counts of published tables (`dlrm`: the distinct ids of one published batch
are the rows, their counts how often each is drawn). The profile that predictions rest
on is that of one batch of the same length, which no cache is fed with.

Misses are counted as FBGEMM's `num_unique_misses` over its `num_unique_indices`, by its
rules written anew for the host (its CPU build has no such operator): a set by the hash
of the row, 32 slots; least recently used by the batch of last use, a row that this
batch has never going out; least frequently used by all counts so far, ties going in.
Counted is from when the cache is full and has been turned over (see `--warm-up`).
"""

from __future__ import annotations

import argparse
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.provenance import describe_run, keep_rows, kept_rows
from torchrec_neuroshard.cost_models.row_cache import ASSOCIATIVITY, MissCurve
from torchrec_neuroshard.profiles import profile_ids
from torchrec_neuroshard.workloads import load_json

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

LOAD_FACTORS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
ALGORITHMS = ("lru", "lfu")
PUBLISHED = "dlrm_datasets_2021_t856_bs65536"
COUNTED = 20
"""Batches over which misses are counted."""


class RowCache:
    """FBGEMM's cache of one table, fed with batches of distinct rows."""

    def __init__(self, num_rows: int, load_factor: float, algorithm: str) -> None:
        """Take the size that FBGEMM gives it."""
        slots = int(num_rows * load_factor) + ASSOCIATIVITY - 1
        self.num_sets = max(1, slots // ASSOCIATIVITY)
        shape = (self.num_sets, ASSOCIATIVITY)
        self.row_CS = np.full(shape, -1, dtype=np.int64)
        self.time_CS = np.full(shape, -1, dtype=np.int64)
        self.count_R = np.zeros(num_rows, dtype=np.int64)
        self.is_lfu = algorithm == "lfu"
        self.set_R = _sets(np.arange(num_rows), self.num_sets)
        self.now = 0

    @property
    def is_full(self) -> bool:
        """Whether next to no slot is empty."""
        return bool((self.row_CS >= 0).mean() >= 0.995)

    def feed(self, rows: Ints, counts: Ints) -> int:
        """Take a batch's distinct rows in; returns how many were not there."""
        self.now += 1
        self.count_R[rows] += counts
        sets = self.set_R[rows]
        there = self.row_CS[sets] == rows[:, None]
        found = there.any(axis=1)
        self.time_CS[sets[found], there[found].argmax(axis=1)] = self.now
        missed, missed_sets = rows[~found], sets[~found]
        # In each set, by the row; least frequently used: the most frequent first.
        rank = -self.count_R[missed] if self.is_lfu else missed
        order = np.lexsort((missed, rank, missed_sets))
        missed, missed_sets = missed[order], missed_sets[order]
        used, first, number = np.unique(
            missed_sets, return_index=True, return_inverse=True
        )
        place = np.arange(len(missed)) - first[number]
        if self.is_lfu:
            held = self.row_CS[used]
            age_US = np.where(held >= 0, self.count_R[held], -1)
            limit = self.count_R[missed]
        else:
            age_US, limit = self.time_CS[used], np.full(len(missed), self.now - 1)
        slot_US = np.argsort(age_US, axis=1, kind="stable")
        fits = np.flatnonzero(place < ASSOCIATIVITY)
        number, place = number[fits], place[fits]
        slot = slot_US[number, place]
        goes_in = age_US[number, slot] <= limit[fits]
        fits, number, slot = fits[goes_in], number[goes_in], slot[goes_in]
        self.row_CS[used[number], slot] = missed[fits]
        self.time_CS[used[number], slot] = self.now
        return len(missed)


def _sets(rows: Ints, num_sets: int) -> Ints:
    """Set of each row: MurmurHash3's finalizer, modulo the number of sets."""
    h = rows.astype(np.uint64)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53, 1):
        h ^= h >> np.uint64(33)
        h *= np.uint64(factor)
    return (h % np.uint64(num_sets)).astype(np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """Ids of one table, drawn independently."""

    name: str
    weight_R: Floats
    """How often each row is drawn, relative to the others."""
    lookups: int
    """Of a batch."""

    def batches(self) -> Iterator[Ints]:
        """Yield the ids of one batch after the other, without an end."""
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        row_R = rng.permutation(len(self.weight_R))
        below_R = np.cumsum(self.weight_R[row_R] / self.weight_R.sum())
        while True:
            draws = np.searchsorted(below_R, rng.random(self.lookups))
            yield np.minimum(draws, len(row_R) - 1)


def make_streams(path: Path | None, quick: bool) -> Iterator[Stream]:
    """Return power laws, then published tables."""
    sizes = [(50_000, 4_000), (200_000, 40_000)]
    if not quick:
        sizes += [(1_000_000, 20_000), (1_000_000, 200_000)]
    for rows, lookups in sizes:
        for exponent in (0.0, 0.6, 0.9, 1.05, 1.2):
            yield Stream(
                name=f"power {exponent}, {rows:,} rows, {lookups:,} ids",
                weight_R=np.arange(1.0, rows + 1) ** -exponent,
                lookups=lookups,
            )
    tables = load_json(path)[PUBLISHED] if path is not None else ()
    rng = np.random.default_rng(0)
    known = []
    for table in tables:
        profile = table.profile
        if profile is not None and 50_000 <= profile.num_distinct <= 500_000:
            known.append((table, profile))
    count = min(len(known), 2 if quick else 6)
    for place in sorted(rng.choice(len(known), count, replace=False)) if known else ():
        table, profile = known[place]
        for batch in (2_048, 8_192):
            ids = np.round(profile.access_histogram).astype(int)
            yield Stream(
                name=f"{table.name} of {int(ids.sum()):,} rows, batch {batch}",
                weight_R=np.repeat(profile.bin_mean_counts(), ids),
                lookups=round(profile.num_lookups * batch / profile.batch_size),
            )


def judge(
    stream: Stream, algorithm: str, load_factor: float, most: int
) -> dict[str, Any]:
    """Count misses, and predict them."""
    batches = stream.batches()
    ids, rows = next(batches), len(stream.weight_R)
    curve = MissCurve(
        profile_ids(ids, np.ones(1, dtype=np.int64)), rows, is_lfu=algorithm == "lfu"
    )
    row: dict[str, Any] = {
        "stream": stream.name,
        "algorithm": algorithm,
        "load_factor": load_factor,
        "predicted": float(curve.misses([load_factor])[0]),
    }
    cache = RowCache(rows, load_factor, algorithm)
    full, missed, distinct = 0, 0, 0
    for number in range(1, most + 1):
        found, counts = np.unique(next(batches), return_counts=True)
        missing = cache.feed(found, counts)
        if not full and cache.is_full:
            full = number
        # Frequencies settle slowly: least frequently used takes all that there is.
        warm = most - COUNTED if algorithm == "lfu" else 3 * full + COUNTED
        if full and number > warm:
            missed, distinct = missed + missing, distinct + len(found)
            if number >= warm + COUNTED:
                break
    row |= {"batches": number, "distinct": distinct / COUNTED}
    row["counted"] = missed / distinct if number >= warm + COUNTED and full else None
    return row


def summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Errors by algorithm and kind of stream, as lines of a table."""
    lines = [
        "| cache | streams | cases | median error | 90 % below | worst "
        "| mean difference of shares |",
        "|---" * 7 + "|",
    ]
    for algorithm in ALGORITHMS:
        for kind in ("power", "dlrm", ""):
            own = [
                r
                for r in rows
                if r["algorithm"] == algorithm
                and r["stream"].startswith(kind)
                and r["counted"]
            ]
            if not own:
                continue
            counted = np.array([r["counted"] for r in own])
            difference = np.abs([r["predicted"] for r in own] - counted)
            error = difference / counted
            name = {"power": "power laws", "dlrm": "published counts"}.get(kind, "all")
            cells = [algorithm.upper(), name, str(len(own))]
            cells += [f"{100 * np.quantile(error, q):.1f} %" for q in (0.5, 0.9, 1.0)]
            lines.append("| " + " | ".join([*cells, f"{difference.mean():.4f}"]) + " |")
    return lines


def page(settings: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """The results as a page."""
    lines = [
        "| stream | cache | load factor | distinct | counted | predicted | error |"
    ]
    lines.append("|---" * 7 + "|")
    for r in rows:
        counted, predicted = r["counted"], r["predicted"]
        cells = [r["stream"], r["algorithm"].upper(), str(r["load_factor"])]
        cells += [f"{r['distinct']:.0f}" if counted is not None else "-"]
        if counted is None:
            cells += ["not full in time", f"{predicted:.4f}", "-"]
        else:
            error = f"{100 * (predicted / counted - 1):+.1f} %" if counted else "-"
            cells += [f"{counted:.4f}", f"{predicted:.4f}", error]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(
        (
            "# Misses of caches of rows, predicted and counted\n",
            str(__doc__),
            *summary(rows),
            "\n## Each case\n",
            *lines,
            f"\n```json\n{json.dumps(settings, indent=1)}\n```\n",
        )
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Count and predict all cases."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--tables", type=Path, help="JSON of published table sets")
    parser.add_argument("--warm-up", type=int, default=200, help="batches at most")
    parser.add_argument("--quick", action="store_true", help="some streams")
    parser.add_argument("--resume", action="store_true", help="keep what <out> has")
    parser.add_argument("--out", type=Path, help="path without suffix")
    options = parser.parse_args(arguments)
    settings = {**describe_run(), "warm_up": options.warm_up, "counted": COUNTED}
    rows = kept_rows(options.out, resume=options.resume)
    known = {row["stream"] for row in rows}
    for stream in make_streams(options.tables, options.quick):
        if stream.name in known:
            continue
        rows += [
            judge(stream, algorithm, load_factor, options.warm_up)
            for algorithm in ALGORITHMS
            for load_factor in LOAD_FACTORS
        ]
        print("\n".join([stream.name, *summary(rows)]), flush=True)
        keep_rows(options.out, settings, rows, page)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
