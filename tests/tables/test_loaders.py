from __future__ import annotations

import dataclasses
import io
import json
import sys
from pathlib import Path

import pytest

from torchrec_neuroshard.errors import ConfigError, ProfileError
from torchrec_neuroshard.tables.loaders import (
    load_json,
    load_profiles,
    read_tables,
    save_profiles,
)
from torchrec_neuroshard.tables.profile import FeatureProfile, zipf_profile
from torchrec_neuroshard.tables.table import TableConfig


def test_workloads_are_unrolled_and_one_of_several_is_named(tmp_path: Path) -> None:
    histogram = [2, 1, *[0] * 15]
    counted = {"batch_size": 4, "rows": [100], "lookups": [4]}
    groups = [
        {"num_tables": 2, "rows": 100, "dim": 16, "hotness": 3},
        {"num_tables": 1, "rows": 50, "dim": 8, "hotness": [1, 10]},
    ]
    workloads = [
        {"name": "w", **counted, "count_hist": [histogram]},
        {"name": "two", "rows": [100, 200], "dims": [6, 16]},
        {"name": "b", "rows": [100], "pooling": [2.5], "dim": 32},
        {"name": "g", "groups": groups},
    ]
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"workloads": workloads}))
    loaded = load_json(path)
    (table,) = loaded["w"]
    assert table.profile is not None
    assert table.profile.access_histogram == tuple(histogram)
    assert (table.profile.batch_size, table.pooling_factor) == (4, 1.0)
    assert table.embedding_dim == 64
    plain = [*loaded["two"], *loaded["b"]]
    widths = [(t.embedding_dim, t.pooling_factor) for t in plain]
    assert widths == [(8, 1.0), (16, 1.0), (32, 2.5)]
    found = [(t.name, t.pooling_factor, t.num_features) for t in loaded["g"]]
    assert found == [("g/0", 3, 1), ("g/1", 3, 1), ("g/2", 11, 2)]
    assert len(read_tables(path, "two").tables) == 2
    for name, message in (
        (None, "choose one with .*t.json:NAME; they are w, two, b, g"),
        ("tow", "none is named 'tow'; did you mean 'two'"),
        ("three", "the workloads are 'b', 'g', 'two', 'w'"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_tables(path, name)


FILES = {
    "t.csv": "name,num_embeddings,embedding_dim,weighted\na,10,8,true\nb,20,4,\n",
    "list.json": '[{"name": "a", "num_embeddings": 10, "embedding_dim": 8, '
    '"weighted": true}, {"name": "b", "num_embeddings": 20, "embedding_dim": 4.0}]',
}
FILES["tables.json"] = f'{{"tables": {FILES["list.json"]}}}'
FILES["t.YML"] = """\ufeff# a comment
- name: a
  num_embeddings: 10
  embedding_dim: 8
  weighted: yes
- {name: b, num_embeddings: 2_0, embedding_dim: 4}
"""
FILES["w.json"] = f'{{"workloads": [{{"name": "w", "tables": {FILES["list.json"]}}}]}}'
# Variants that people, spreadsheets, editors and other systems write.
FILES["cased.csv"] = FILES["t.csv"].replace("name,num_emb", "Name,Num_Emb")
FILES["written.csv"] = """\
name,num_embeddings,embedding_dim,weighted,data_type,optimizer
a,1e1,8.0,YES,torch.float32,RowWiseAdagrad
b,2_0,"0,004",0,NULL,EXACT_ROWWISE_ADAGRAD
"""
FILES["texts.json"] = FILES["list.json"].replace("10", '"10"').replace("true", '"yes"')
FILES["bom.csv"] = "\ufeff" + FILES["t.csv"].replace("\n", "\r\n")
FILES["spaced.CSV"] = FILES["t.csv"].replace(",", " ; ").replace("\n", ";\n\n")
CSV = "name,num_embeddings,embedding_dim\n"
W = '{"name": "w", "rows": [9]}'


@pytest.mark.parametrize("name", FILES)
def test_tables_of_every_kind_of_file(name: str, tmp_path: Path) -> None:
    if not name.endswith(("csv", "CSV", "json")):
        pytest.importorskip("yaml")
    (tmp_path / name).write_bytes(FILES[name].encode())
    assert read_tables(tmp_path / name).tables == (
        TableConfig(name="a", num_embeddings=10, embedding_dim=8, weighted=True),
        TableConfig(name="b", num_embeddings=20, embedding_dim=4),
    )


@pytest.mark.parametrize("name", [n for n in FILES if n != "w.json"])
def test_standard_input_holds_tables_of_any_format(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if FILES[name].startswith("\ufeff# a comment"):
        pytest.importorskip("yaml")
    assert len(read_piped(FILES[name], monkeypatch)) == 2


def read_piped(text: str, monkeypatch: pytest.MonkeyPatch) -> tuple[TableConfig, ...]:
    """Read tables from a text in standard input."""
    stdin = io.TextIOWrapper(io.BytesIO(text.encode()))
    monkeypatch.setattr(sys, "stdin", stdin)
    return read_tables("-").tables


def test_yaml_is_told_from_csv(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("yaml")
    one = "name: a, num_embeddings: 9, embedding_dim: 4"
    for text in (f"- {{{one}}}", f"tables: [{{{one}}}]", f"---\n- {{{one}}}"):
        assert len(read_piped(text, monkeypatch)) == 1


def test_bad_standard_input_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, message in (
        (" \n", "standard input holds no tables: pipe CSV, JSON or YAML into it"),
        ("a,9,8\n", "standard input, line 1 is not a heading: 'a,9,8'"),
        (f"{CSV}a,9,8\na,9,8\n", "standard input, table 'a' is given twice"),
        ("{", "standard input cannot be read as JSON"),
        (f'{{"workloads": [{W}, {W.replace("w", "v", 1)}]}}', "2 workloads, .*save it"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_piped(text, monkeypatch)
    stdin = io.StringIO("name")
    stdin.isatty = lambda: True  # type: ignore[method-assign]
    for terminal in (stdin, None):
        monkeypatch.setattr(sys, "stdin", terminal)
        with pytest.raises(ConfigError, match="holds no tables: pipe"):
            read_tables("-")
    with pytest.raises(ConfigError, match="cannot read '-': No such file"):
        load_profiles("-")  # only tables are piped


SEQUENCES = """\
# source: somewhere, "quoted
name,num_embeddings,embedding_dim,pooled,pooling_factor,length_p95,length_max
# of items
item,1000,8,false,100,300,400
user,1000,8,false,1,,
"""


def test_tables_of_sequences_have_lengths_and_padding(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(SEQUENCES)
    (item, user), not_described = read_tables(path)
    assert not item.pooled and not user.pooled and not not_described
    assert item.num_outputs == 100 and item.num_bags == 1
    assert item.profile == FeatureProfile.of_lengths(100, 300, 400)
    assert user.profile is None
    path.write_text(
        f"{CSV.strip()},num_features,pooling_factor,length_p95\na,9,8,2,20,30"
    )
    [both], _ = read_tables(path)
    one = FeatureProfile.of_lengths(10, 30)
    assert both.profile == dataclasses.replace(
        one, num_lookups=20.0, common_std=2 * one.common_std
    )
    path.write_text(f"{CSV.strip()},pooling_factor,padding_share\na,1000,8,10,0.6")
    [padded], _ = read_tables(path)
    profile = padded.profile_at(64)
    assert profile.hot_rows is not None
    assert profile.hot_rows.shares([0, 500], [500, 500], 1000) == pytest.approx(
        [0.8, 0.2], abs=1e-3
    )
    # The padding is one id with 384 lookups; Zipf's law has the others.
    assert profile.num_lookups == 640
    rest = zipf_profile(batch_size=64, pooling_factor=4, num_embeddings=1000)
    assert profile.num_distinct == pytest.approx(rest.num_distinct + 1)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("t.csv", f"{CSV.strip()},length_max\na,9,8,5", "line 2: .*'a'.*length_p95"),
        (
            "t.csv",
            f"{CSV.strip()},pooling_factor,length_p95\na,9,8,9,5",
            "line 2: .*'a'.*mean <= p95 <= longest, got 9, 5",
        ),
        ("t.csv", f"{CSV.strip()},padding_share\na,9,8,1.5", "line 2: .*'a'.*0 to 1"),
        ("t.csv", f"{CSV.strip()},pooled\na,9,8,si", "line 2: .*'a'.*pooled must be"),
        (
            "t.csv",
            f"{CSV.strip()},pooled,weighted\na,9,8,false,true",
            "line 2: .*'a'.*weighted must be false if rows are not pooled",
        ),
        (
            "t.csv",
            "a_1,9,8\n",
            "line 1 is not a heading: 'a_1,9,8'. The first line names the columns, "
            "such as name,num_embeddings,embedding_dim,pooling_factor; the fields are",
        ),
        ("t.csv", "a\x1b[2J,9\n", r"is not a heading: 'a\\x1b\[2J,9'"),
        ("t.csv", "# of 2026\nx;y\n", "line 2 is not a heading: 'x;y'"),
        ("t.csv", f",{CSV}0,a,9,8\n", r"line 1: column 1 has no name.*index=False"),
        ("t.csv", f"{CSV.strip()},NAME\n", "line 1, the heading: 'name' appears twice"),
        (
            "t.csv",
            "name,num_embeddings\na,10\n",
            r"line 1, the heading: field 'embedding_dim' is missing \(given: name, num",
        ),
        (
            "t.csv",
            "name,num_embedings,dim\na,10,8\n",
            "line 1, the heading: unknown fields 'num_embedings', 'dim'; did you mean "
            "'num_embeddings' for 'num_embedings', 'embedding_dim' for 'dim'",
        ),
        ("t.csv", f"{CSV}a,,8\n", "line 2: table 'a': field 'num_embeddings' is miss"),
        ("t.csv", CSV, "' holds no tables: expected CSV with a heading"),
        (
            "t.json",
            '[{"name": "a", "rows": 9, "dim": 8}]',
            "table 0: table 'a': unknown fields 'rows', 'dim'; did you mean 'num_emb",
        ),
        (
            "t.json",
            '{"workloads": [{"name": "w", "rows": [9], "hotness": [3]}]}',
            "workload 'w': did you mean 'pooling' or 'lookups' for 'hotness'",
        ),
        (
            "t.json",
            '{"workloads": [{"name": "w", "groups": [{"num_rows": 9, "dim": 8}]}]}',
            "workload 'w': missing: num_tables, hotness; did you mean 'rows' for 'num_",
        ),
        (
            "t.json",
            '{"workloads": [{"name": "w", "tables": [{"name": "a", "dim": 8}]}]}',
            "workload 'w': table 0: table 'a': unknown field 'dim'; .* mean 'embedding",
        ),
        ("t.csv", f"{CSV}a,1x,8\n", "line 2: .*num_embeddings .* '1x'"),
        ("t.csv", f"{CSV}a,9,8\n a ,9,8\n", "'a' is given twice"),
        ("t.csv", f'{CSV}"a,9,8\n', "is a quote left open"),
        ("t.csv", f"{CSV}é,9,8\n".encode("latin-1"), "Save it as UTF-8 text"),
        ("t.json", "[3]", "table 0: .* must be an object, got 3"),
        ("t.json", "{", "cannot be read as JSON"),
        ("t.json", '{"workloads": ["w"]}', "workload 0 is not an object"),
        ("t.json", f'{{"workloads": [{W}, {W}]}}', "two workloads are named 'w'"),
        ("t.json", '{"workloads": [{"rows": [9], "pooling": []}]}', "cannot be read"),
        ("t.json", '[{"name": NaN}]', "not finite"),
        ("t.yaml", "[]", "PyYAML is not installed"),
        ("no.yaml", "- {name: no, num_embeddings: 9, embedding_dim: 4}", "False"),
        ("tab.yaml", "- name: a\n\tnum_embeddings: 9\n", "line 2, column 1"),
        ("code.yaml", "!!python/object/apply:os.getcwd []", "could not determine"),
        ("none.csv", None, "No such file"),
    ],
)
def test_errors_of_bad_files_say_where_and_what_to_do(
    name: str,
    text: str | bytes | None,
    value: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if name == "t.yaml":
        monkeypatch.setitem(sys.modules, "yaml", None)
    elif name.endswith("yaml"):
        pytest.importorskip("yaml")
    if text is not None:
        data = text if isinstance(text, bytes) else text.encode()
        (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError, match=f"(?s){name}.*{value}"):
        read_tables(tmp_path / name)


def test_profiles_are_read_as_they_were_saved(tmp_path: Path) -> None:
    profile = zipf_profile(batch_size=8, pooling_factor=3, num_embeddings=50)
    path = tmp_path / "p.json"
    save_profiles({"user": profile}, path)
    assert load_profiles(path) == {"user": profile}
    fields = json.loads(path.read_text())["user"]
    for bad in ({}, {"batch_size": 2}, {**fields, "x": 1}, [1], None):
        path.write_text(json.dumps({"user": bad}))
        with pytest.raises(ProfileError, match="'user': invalid feature"):
            load_profiles(path)
    for text, says in (("[]", "holds no profiles"), ("{", "cannot be read as JSON")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=says):
            load_profiles(path)
