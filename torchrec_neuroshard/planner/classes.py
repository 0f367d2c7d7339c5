"""Classes of tables: those of one module that differ only in rows and inputs.

TorchRec lists all options of the first table of a class, and one option of each other
table. The others are sharded in the same ways.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from torchrec_neuroshard.planner.compat import optimizer_arguments, optimizer_classes
from torchrec_neuroshard.planner.memory import MemoryModel
from torchrec_neuroshard.planner.option_facts import is_dense
from torchrec_neuroshard.planner.reader import TableReader
from torchrec_neuroshard.planner.spread_options import without_estimates
from torchrec_neuroshard.planner.table_keys import constraint_on
from torchrec_neuroshard.planner.untrained import (
    divides_module,
    fits_without_rows,
    is_mean,
)
from torchrec_neuroshard.planner.ways import Ways, is_placeable, useful_options
from torchrec_neuroshard.tables.sharding_types import MISCOUNTED_TYPES

_INPUTS = ("pooling_factors", "num_poolings", "batch_sizes", "feature_names")
"""Constraints that only say what a table's inputs are."""

_OWN = (
    "name",
    "num_embeddings",
    "feature_names",
    "init_fn",
    "weight_init_max",
    "weight_init_min",
)
"""Fields of a table's configuration on which no way to shard it depends."""

Table = tuple[str, str]
"""Path of a table's module, and the table's name."""


class TableClasses:
    """The classes of a model's tables, while TorchRec lists the model.

    Attributes:
        class_of: Table -> its class.
        first: Class -> its first table.

    Args:
        configs: Table -> TorchRec's configuration.
        constraints: Table name -> TorchRec's constraints.
    """

    def __init__(
        self,
        configs: Mapping[Table, BaseEmbeddingConfig],
        constraints: Mapping[str, ParameterConstraints],
    ) -> None:
        self._configs, self._constraints = configs, constraints
        self._settings: dict[int, tuple[Any, ...]] = {}
        self._one: dict[Hashable, tuple[str, str]] = {}
        self.class_of: dict[Table, Hashable] = {}
        self.first: dict[Hashable, Table] = {}

    def one_of(
        self, table: Table, parameter: nn.Parameter, treatment: Hashable
    ) -> tuple[str, str] | None:
        """Return the only sharding type and kernel to list; None: list all of them.

        Args:
            table: The table that TorchRec is about to list.
            parameter: Its weights.
            treatment: What else the enumerator's choice of options depends on.
        """
        key = self.class_of.get(table)
        if key is None:
            key = self.class_of[table] = self._class(table, parameter, treatment)
        return None if self.first.setdefault(key, table) == table else self._one[key]

    def note(self, table: Table, sharding_type: str, kernels: Sequence[str]) -> None:
        """Note what TorchRec lists of a class's first table."""
        key = self.class_of[table]
        if kernels and self.first[key] == table:
            self._one.setdefault(key, (sharding_type, kernels[0]))

    def _class(
        self, table: Table, parameter: nn.Parameter, treatment: Hashable
    ) -> Hashable:
        config = self._configs.get(table)
        constraint = constraint_on(self._constraints, *table)
        types = (constraint.sharding_types if constraint else None) or ()
        return (
            table[0],
            treatment,
            # Whether a type that miscounts row states can run depends on the rows.
            parameter.shape[MISCOUNTED_TYPES.isdisjoint(types) :],
            parameter.dtype,
            optimizer_classes(parameter),
            repr(optimizer_arguments(parameter)),
            tuple((n, repr(v)) for n, v in vars(config).items() if n not in _OWN)
            if config is not None
            else None,
            self._limits(constraint),
        )

    def _limits(self, constraint: ParameterConstraints | None) -> tuple[Any, ...]:
        """Return what constraints say beside a table's inputs."""
        if constraint is None:
            return ()
        key = id(constraint)
        if key not in self._settings:
            self._settings[key] = tuple(
                (name, repr(value))
                for name, value in vars(constraint).items()
                if name not in _INPUTS
            )
        return self._settings[key]

    def ways(
        self,
        options: Sequence[ShardingOption],
        reader: TableReader,
        memory: MemoryModel,
        room: float,
    ) -> Ways | None:
        """Return the ways of all tables, in the order of tables.

        Args:
            options: All options of each class's first table, and one of each other.
            reader: Describes tables and devices.
            memory: Predicts what ranks allocate.
            room: Bytes of the largest device.

        Returns:
            None if a search cannot place all tables, or if tables of a class differ.
        """
        kinds, templates = self._by_class(options)
        for key, own in kinds.items():
            kinds[key] = [o for o in own if not reader.run_fault(o)]
        if not self._keep_means_apart(kinds, room):
            return None
        for key in kinds:
            if not all(_is_plain(o, reader, memory) for o in kinds[key]):
                return None
            if not any(is_placeable(o, reader) for o in kinds[key]):
                return None
        kernel_of = {key: reader.facts(own[0]).kernel for key, own in kinds.items()}
        if any(
            reader.facts(option).kernel != kernel_of[self.class_of[table]]
            for table, option in templates.items()
        ):
            return None
        listed = [option for own in kinds.values() for option in own]
        return self._rows(useful_options(listed, reader), templates)

    def _keep_means_apart(
        self, kinds: dict[Hashable, list[ShardingOption]], room: float
    ) -> bool:
        """Remove row-wise kinds of MEAN tables beside other kinds; see `mixed_means`.

        Returns:
            False if some MEAN table may only fit row-wise.
        """
        modules: dict[str, list[Hashable]] = {}
        for key in kinds:
            modules.setdefault(self.first[key][0], []).append(key)
        tables = Counter(path for path, _ in self.class_of)
        for path, keys in modules.items():
            means = [key for key in keys if is_mean(self._configs.get(self.first[key]))]
            divides = {divides_module(o) for key in keys for o in kinds[key]}
            if tables[path] == 1 or not means or divides != {False, True}:
                continue
            for key in means:
                rows = [
                    self._configs[table].num_embeddings
                    for table, own in self.class_of.items()
                    if own == key
                ]
                if not fits_without_rows(kinds[key], max(rows), room):
                    return False
                kinds[key] = [o for o in kinds[key] if not divides_module(o)]
        return True

    def _by_class(
        self, options: Sequence[ShardingOption]
    ) -> tuple[dict[Hashable, list[ShardingOption]], dict[Table, ShardingOption]]:
        """Return all options of each class's first table, and one of each table."""
        kinds: dict[Hashable, list[ShardingOption]] = {}
        templates: dict[Table, ShardingOption] = {}
        for option in options:
            table = option.path, option.name
            templates.setdefault(table, option)
            if self.first[self.class_of[table]] == table:
                kinds.setdefault(self.class_of[table], []).append(option)
        return kinds, templates

    def _rows(
        self, kinds: Sequence[ShardingOption], templates: Mapping[Table, ShardingOption]
    ) -> Ways:
        """Return a row for each table and each kind of its class."""
        kinds_of: dict[Hashable, list[int]] = {}
        for number, kind in enumerate(kinds):
            key = self.class_of[kind.path, kind.name]
            kinds_of.setdefault(key, []).append(number)
        tables: list[ShardingOption] = []
        table_R: list[int] = []
        kind_R: list[int] = []
        for table, template in templates.items():
            places: dict[bool, int] = {}
            for number in kinds_of[self.class_of[table]]:
                dense = is_dense(kinds[number])
                if dense not in places:
                    places[dense] = len(tables)
                    tables.append(_described(template, kinds[number]))
                table_R.append(places[dense])
                kind_R.append(number)
        return Ways(tuple(tables), tuple(kinds), np.array(table_R), np.array(kind_R))


def _described(template: ShardingOption, kind: ShardingOption) -> ShardingOption:
    """Return an option that describes a table for a kernel of this kind."""
    if is_dense(template) == is_dense(kind):
        return template
    other = without_estimates(template)
    other.compute_kernel = kind.compute_kernel
    return other


def _is_plain(option: ShardingOption, reader: TableReader, memory: MemoryModel) -> bool:
    """Whether an option needs nothing that depends on its table alone."""
    return (
        option.dependency is None
        and memory.knows(option)
        and not any(reader.facts(option).id_map_bytes)
    )
