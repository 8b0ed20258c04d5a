"""Variants of a rule: its document with other values of its parameters, all combinations of them (contract 10.3)."""

from __future__ import annotations

import numpy as np
import pytest

from lookback.core.errors import RuleError
from lookback.core.rules.variants import MAX_VARIANTS, make_variants, read_varied, suggest_values
from lookback.core.streams.flagged import count_bits, make_bits

RULE = {"rule_id": "spend", "parameters": {"limit": 1000, "span": "24 hours"}, "tests": [{"events": []}]}
OTHER = {"rule_id": "burst", "parameters": {"least": 3}}


def problems(varied: dict[str, list[object]]) -> list[str]:
    with pytest.raises(RuleError) as caught:
        make_variants([RULE, OTHER], varied)
    return [str(each) for each in caught.value.problems]


def test_c10_3_several_parameters_give_their_product() -> None:
    spend, burst = make_variants([RULE, OTHER], {"limit": ["500", 1000], "span": ["1 hour", "24 hours"]})
    assert [each.parameters for each in spend] == [
        {"limit": 500, "span": "1 hour"},
        {"limit": 500, "span": "24 hours"},
        {"limit": 1000, "span": "1 hour"},
        {"limit": 1000, "span": "24 hours"},
    ]
    assert spend[0].text == '{"limit": 500, "span": "1 hour"}'
    assert not any("tests" in each.document for each in spend)
    assert [each.document for each in burst] == [OTHER]


def test_c10_3_equal_variants_are_made_once() -> None:
    (variants,) = make_variants([RULE], {"limit": ["500", "5e2", 500, "600"]})
    assert [each.parameters["limit"] for each in variants] == [500, 500.0, 600]
    assert [each.text for each in make_variants([RULE], {})[0]] == ['{"limit": 1000, "span": "24 hours"}']


def test_c10_3_wrong_variants_are_refused_with_the_remedy() -> None:
    assert problems({"limt": ["1"]}) == ["unknown parameter limt; did you mean 'limit'? (parameters.limt)"]
    assert problems({"weekday": ["1"]}) == ["unknown parameter weekday; known: limit, span, least (parameters.weekday)"]
    assert problems({"limit": ["many", "1", "few"]}) == [
        "parameters.limit must be a number, such as 1000, got 'many' (parameters.limit)",
        "parameters.limit must be a number, such as 1000, got 'few' (parameters.limit)",
    ]
    (found,) = problems({"limit": list(range(MAX_VARIANTS)), "span": ["1 hour", "2 hours"]})
    assert found.startswith("200 of limit x 2 of span give 400 variants, more than 200; use fewer values")
    with pytest.raises(RuleError, match="add one under `parameters`"):
        make_variants([{"rule_id": "plain"}], {"limit": [1]})


def test_the_values_of_a_parameter_are_read_from_one_text() -> None:
    assert read_varied(["limit=500, 1000", 'kind="a,b",c']) == {"limit": ["500", "1000"], "kind": ["a,b", "c"]}
    for text, message in (
        ("limit", "'limit' is not NAME=VALUE,VALUE"),
        ("=1", "is not NAME=VALUE"),
        ("limit=", "limit has an empty value"),
        ("limit=1,,2", "limit has an empty value"),
    ):
        with pytest.raises(ValueError, match=message):
            read_varied([text])
    with pytest.raises(ValueError, match="limit is given twice"):
        read_varied(["limit=1", "limit=2"])


def test_values_around_the_present_one_are_suggested() -> None:
    (values,) = suggest_values(RULE).values()
    assert (values[0], values[8], values[-1], len(values)) == (250, 1000, 4000, 17)
    assert suggest_values({"parameters": {"span": "1 day", "share": 0.5}})["share"][8] == 0.5
    assert suggest_values({"parameters": {"on": True, "none": 0}}) == suggest_values({}) == {}
    assert suggest_values({"parameters": {"least": 2}}) == {"least": [1, 2, 3, 4, 5, 6, 7, 8]}


def test_flags_are_counted_as_they_were_set() -> None:
    chance = np.random.default_rng(3)
    flags = [(bit, np.sort(chance.choice(50, size=chance.integers(50), replace=False))) for bit in (0, 5, 63, 64, 130)]
    bits = make_bits(50, flags)
    assert (bits.shape, bits.dtype) == ((50, 3), np.int64)
    counts = count_bits(bits, 140)
    assert {bit: int(count) for bit, count in enumerate(counts) if count} == {
        bit: len(at) for bit, at in flags if len(at)
    }
    assert make_bits(2, []).tolist() == [[0], [0]]
