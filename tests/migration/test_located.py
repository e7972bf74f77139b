"""JSON with places: what is no JSON is an error with line and column, everything else has its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_zero.migration.located import MigrationError, load, parse

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), VALUES, max_size=4), st.sampled_from([None, 0, 2]), st.booleans())
def test_json_is_read_as_python_reads_it(values: dict[str, Any], indent: int | None, ascii_only: bool) -> None:
    text = json.dumps(values, indent=indent, ensure_ascii=ascii_only)
    document = parse(text, "a.json")
    assert document.values == json.loads(text)
    lines = text.split("\n")
    for path, (line, column) in document.places.items():
        found: Any = values
        for part in path:
            found = found[int(part)] if isinstance(found, list) else found[part]
        rest = "\n".join([lines[line - 1][column - 1 :], *lines[line:]])
        assert json.JSONDecoder().raw_decode(rest)[0] == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{\n  "a": 1, // note\n}', "2:11: a comment, which JSON does not have"),
        ("{\n  # note\n}", "2:3: a comment"),
        ('{"a": /* note */ 1}', "1:7: a comment"),
        ('{\n  "a": 1,\n}', "2:9: a comma before '}'"),
        ('{"a": [1, 2,]}', "1:12: a comma before ']'"),
        ('{"a": 1 "b": 2}', "1:9: expected ',' or '}', got '\"'"),
        ('{"a": 1', "1:8: a '}' is missing"),
        ("{'a': 1}", "1:2: expected a key in double quotes"),
        ('{"a" 1}', "1:6: expected ':' after the key 'a'"),
        ('{"a": True}', "1:7: 'True' is no JSON value: JSON writes true"),
        ('{"a": adam}', "1:7: 'adam' is no JSON value: texts stand in double quotes"),
        ('{"a": 1.}', "1:7: '1.' is no JSON value"),
        ('{"a": }', "1:7: expected a value, got '}'"),
        ('{"a":', "1:6: the file ends where a value should be"),
        ('{"a": "b\n"}', "1:9: a text with an error"),
        ('{"a": 1, "b": {"c": 1,\n "c": 2}}', "2:2: the key 'c' is here a second time"),
        ('{"a": 1} {', "1:10: '{' after the end of the object"),
        ('{"a": ' + 5000 * "9" + "}", "1:7: a number of 5000 characters; at most 400 are read"),
        (20_000 * '{"a":', "1:506: more than 100 objects and arrays in one another"),
        ("[1]", "1:1: a configuration is a JSON object"),
        ("", "1:1: a configuration is a JSON object"),
    ],
)
def test_what_is_no_json_is_an_error_with_its_place(text: str, message: str) -> None:
    with pytest.raises(MigrationError) as raised:
        parse(text, "ds.json")
    assert str(raised.value).startswith(f"ds.json:{message}")


def test_files_of_other_editors_and_dictionaries(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_bytes(b'\xef\xbb\xbf{"steps_per_print":\r\n Infinity}')
    document = load(path)
    assert document.values == {"steps_per_print": float("inf")}
    assert document.places[("steps_per_print",)] == (2, 2)
    path.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(MigrationError, match="byte 7 is no UTF-8"):
        load(path)
    with pytest.raises(MigrationError, match="the key 1 is a int"):
        load({"fp16": {1: 2}})
