"""Cases without tables: copies, orders of columns and ids, codecs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from rank_kernels.shapes import Case, Notes, Passes, Shape
from torchrec_neuroshard.measure.clock import Backward, Forward
from torchrec_neuroshard.measure.kernels import InputBatch, column_permutation
from torchrec_neuroshard.tables.table import TableConfig

MIB = 2**20
SIZES_MIB: Sequence[float] = (1, 4, 16, 64, 256)
MOST_IDS = 2**25
"""Most ids of a case."""


def nothing(output: Any) -> None:
    """Stand for a backward that a kernel lacks."""


def repeat(forward: Forward, backward: Backward = nothing) -> Passes:
    """Return passes that all do the same."""
    return itertools.repeat((forward, backward))


def copy_cases(quick: bool) -> Iterator[Case]:
    """Yield copies; two bytes move for each byte that is copied."""

    def passes(num_bytes: int, device: torch.device, notes: Notes) -> Passes:
        source = torch.zeros(num_bytes // 4, device=device)
        target = torch.empty_like(source)
        return repeat(lambda: target.copy_(source))

    for mib in (1,) if quick else (16, 256, 4096):
        yield Case(
            shape={"mib": mib},
            unit="bytes",
            amount=mib * MIB,
            passes=partial(passes, mib * MIB),
            has_backward=False,
        )


def row_order_cases(quick: bool) -> Iterator[Case]:
    """Yield gathers of rows, as row-wise sequences return to their order."""

    def passes(rows: int, width: int, device: torch.device, notes: Notes) -> Passes:
        values = torch.ones(rows, width, device=device, requires_grad=True)
        order, gradient = torch.randperm(rows, device=device), values.detach()

        def backward(output: torch.Tensor) -> None:
            values.grad = None
            torch.autograd.backward(output, gradient)

        return repeat(partial(torch.index_select, values, 0, order), backward)

    for mib, width in itertools.product(sizes_mib(quick), (64, 512)):
        rows = int(mib * MIB) // (4 * width)
        yield Case(
            shape={"mib": mib, "width": width},
            unit="bytes",
            amount=4 * rows * width,
            passes=partial(passes, rows, width),
        )


def sizes_mib(quick: bool) -> Sequence[float]:
    """Return sizes of outputs [MiB]."""
    return (1 / 8, 1 / 4) if quick else SIZES_MIB


def column_order_cases(quick: bool) -> Iterator[Case]:
    """Yield reorderings of 1,024 columns in parts of one width."""

    def passes(
        widths: Sequence[int], batch_size: int, device: torch.device, notes: Notes
    ) -> Passes:
        values = torch.ones(batch_size, sum(widths), device=device)
        # FBGEMM's backward runs the same kernel with the parts in reverse order.
        back = column_permutation(widths[::-1], device)
        return repeat(
            partial(column_permutation(widths, device), values),
            lambda output: nothing(back(output)),
        )

    for mib, width in itertools.product(sizes_mib(quick), (16, 128)):
        widths, batch_size = (width,) * (1024 // width), int(mib * MIB) // 4096
        yield Case(
            variant=f"parts of {width} columns",
            shape={"batch_size": batch_size, "widths": widths},
            unit="bytes",
            amount=mib * MIB,
            passes=partial(passes, widths, batch_size),
        )


def id_shapes(
    quick: bool, features: Sequence[int], batches: Sequence[int]
) -> Iterator[tuple[Shape, int]]:
    """Yield features with the batch of one rank, and a number of ranks."""
    poolings: Sequence[float] = (1.0, 20.0)
    worlds: Sequence[int] = (8, 64)
    if quick:
        features, batches, poolings, worlds = features[:1], (16,), (2.0,), (2,)
    for number, batch_size, pooling, world in itertools.product(
        features, batches, poolings, worlds
    ):
        table = TableConfig(
            name="t", num_embeddings=10**6, embedding_dim=4, pooling_factor=pooling
        )
        yield Shape((table,) * number, batch_size), world


def bucketize_passes(
    tables: Sequence[TableConfig],
    batches: Iterable[InputBatch],
    num_ranks: int,
    device: torch.device,
    *,
    sequence: bool = False,
) -> Passes:
    """Yield passes that split ids by row shard.

    Args:
        tables: Tables of the ids.
        batches: Batches of one rank, taken one at a time.
        num_ranks: Ranks over which the rows are split.
        device: CPU or CUDA device.
        sequence: Whether ids of one rank stay in their order.
    """
    blocks = torch.tensor([-(-t.num_embeddings // num_ranks) for t in tables])
    blocks = blocks.to(device)

    def forward(batch: InputBatch, lengths: torch.Tensor) -> torch.Tensor:
        found: tuple[torch.Tensor, ...] = (
            torch.ops.fbgemm.block_bucketize_sparse_features(
                lengths,
                batch.indices_L,
                bucketize_pos=False,
                sequence=sequence,
                block_sizes=blocks,
                my_size=num_ranks,
            )
        )
        return found[0]

    for batch in batches:
        yield partial(forward, batch, batch.offsets.diff()), nothing


def bucketize_cases(quick: bool) -> Iterator[Case]:
    """Yield the split of ids by row shard, before they are sent."""

    def passes(
        shape: Shape, world: int, sequence: bool, device: torch.device, notes: Notes
    ) -> Passes:
        batches = shape.batches(device)
        return bucketize_passes(shape.tables, batches, world, device, sequence=sequence)

    for (shape, world), variant in itertools.product(
        id_shapes(quick, (1, 8, 26), (2048, 16384)), ("pooled", "sequence")
    ):
        run = partial(passes, shape, world, variant == "sequence")
        case = dataclasses.replace(shape.case(variant, run), has_backward=False)
        yield dataclasses.replace(case, shape={**case.shape, "ranks": world})


def permute_cases(quick: bool) -> Iterator[Case]:
    """Yield the reordering of received bags, from rank by rank to table by table."""

    def passes(shape: Shape, world: int, device: torch.device, notes: Notes) -> Passes:
        tables = len(shape.tables) // world
        order = torch.arange(len(shape.tables), dtype=torch.int32, device=device)
        order = order.view(world, tables).T.contiguous().view(-1)

        def forward(batch: InputBatch, lengths: torch.Tensor) -> torch.Tensor:
            # With the number of ids, as TorchRec calls it: the host need not wait.
            found: tuple[torch.Tensor, ...] = torch.ops.fbgemm.permute_2D_sparse_data(
                order, lengths, batch.indices_L, None, batch.indices_L.numel()
            )
            return found[1]

        for batch in shape.batches(device):
            lengths = batch.offsets.diff().view(len(shape.tables), -1)
            yield partial(forward, batch, lengths), nothing

    for own, world in id_shapes(quick, (1, 4, 8), (1024, 8192)):
        received = Shape(own.tables * world, own.batch_size)
        if received.lookups > MOST_IDS:
            continue
        run = partial(passes, received, world)
        case = dataclasses.replace(received.case("", run), has_backward=False)
        yield dataclasses.replace(case, shape={**own.to_json(), "ranks": world})


def codec_cases(quick: bool) -> Iterator[Case]:
    """Yield codecs of quantised collectives; bytes are those of the floats."""

    def passes(name: str, num_bytes: int, device: torch.device, notes: Notes) -> Passes:
        from torchrec.distributed import fbgemm_qcomm_codec as codecs

        config = codecs.QCommsConfig(forward_precision=codecs.CommType(name))
        codec = codecs.get_qcomm_codecs(config).forward
        assert codec is not None
        context = codec.create_context()
        values = torch.randn(num_bytes // 4, device=device)
        return repeat(
            lambda: codec.encode(values, context),
            lambda coded: nothing(codec.decode(coded, context)),
        )

    for name, mib in itertools.product(("fp16", "bf16", "int8"), sizes_mib(quick)):
        yield Case(
            variant=name,
            shape={"mib": mib},
            unit="bytes",
            amount=mib * MIB,
            passes=partial(passes, name, int(mib * MIB)),
        )
