"""Contract 11.3: the contents of lists, as the changes of table `lists` make them."""

from __future__ import annotations

import time
from collections import Counter
from ipaddress import ip_address, ip_network
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from growth import takes_at_most
from lookback.core.errors import StateError
from lookback.core.values import lists as lists_module
from lookback.core.values.addresses import explain_no_range
from lookback.core.values.columns import from_values
from lookback.core.values.contents import read_contents, set_contents
from lookback.core.values.listchanges import FOREVER, ListChange
from lookback.core.values.lists import KnownLists, Lists, _List, _Values
from lookback.core.values.pages import encode_page
from lookback.core.values.types import STRING


def insert(value: str | None, until: int | None = None, name: str | None = "l", kind: str | None = None) -> ListChange:
    return ListChange("insert", 1, name, value, until, kind)


def delete(value: str, until: int | None = None, name: str = "l", kind: str | None = None) -> ListChange:
    return ListChange("delete", 2, name, value, until, kind)


def find(lists: Lists, *texts: str | None, at: int = 0, name: str = "l") -> list[bool]:
    times = np.full(len(texts), at, dtype=np.int64)
    return (times < lists.find_until(name, from_values(STRING, list(texts)))).tolist()


def test_c11_3_a_value_is_a_member_before_it_expires_and_not_from_then_on() -> None:
    lists = Lists.empty().apply([insert("a", 10), insert("b"), insert("c", -(2**60))])
    assert [find(lists, "a", "b", "c", at=at) for at in (9, 10, 2**60)] == [
        [True, True, False], [False, True, False], [False, True, False],
    ]  # fmt: skip
    assert (lists.commit, lists.count, lists.counts, lists.names) == (1, 3, {"l": 3}, {"l"})


def test_c11_3_a_row_may_be_there_twice_and_the_latest_expiry_counts() -> None:
    """An UPDATE is a delete of the row before it and an insert of the row after it."""
    lists = Lists.empty().apply([insert("a", 5), insert("a", 9), insert("a", 9)])
    assert [find(lists, "a", at=at)[0] for at in (8, 9)] == [True, False]
    lists = lists.apply([delete("a", 9)])
    assert (find(lists, "a", at=8), lists.count) == ([True], 2)
    lists = lists.apply([delete("a", 9), insert("a", 7)])
    assert [find(lists, "a", at=at)[0] for at in (6, 7)] == [True, False]
    lists = lists.apply([delete("a", 5), delete("a", 7), delete("a", 7)])
    assert (find(lists, "a", at=4), lists.count, lists.names) == ([False], 0, frozenset())


def test_c11_3_rows_without_a_list_or_a_value_count_nowhere_and_a_list_that_is_not_there_is_empty() -> None:
    lists = Lists.empty().apply([insert(None), insert("a", name=None)], 7)
    assert (lists.count, lists.commit) == (0, 7)
    assert find(lists, "a", None, name="nobody") == [False, False]
    assert find(Lists.empty(), "a") == [False]
    assert KnownLists({7: lists}).read(None, frozenset("l")) == Lists.empty()
    with pytest.raises(StateError, match="commit 8 is not known"):
        KnownLists({7: lists}).read(8, frozenset("l"))


def test_c11_3_values_are_compared_as_texts_whatever_they_are() -> None:
    odd = ["", " ", "é", "e\u0301", "'", "\\", "a\nb", "0", "00", "x" * 10_000, "\U0001f600"]
    lists = Lists.empty().apply([insert(text) for text in odd[::2]])
    assert find(lists, *odd) == [at % 2 == 0 for at in range(len(odd))]


def test_c11_3_of_a_list_of_ranges_addresses_within_are_members() -> None:
    values = ["10.0.0.0/8", "192.168.1.7", "2001:db8::/32", "no address", "172.16.0.9/12"]
    lists = Lists.empty().apply([insert(value, 9, kind="cidr") for value in values])
    inside = [
        "10.255.255.255",
        "192.168.1.7",
        "2001:DB8::9",
        "no address",
        "172.31.0.0",
        "10.0.0.0/8",
        "::ffff:10.0.0.1",
        "::FFFF:0a00:1",
    ]
    outside = ["11.0.0.0", "192.168.1.8", "2001:db9::", "", "172.32.0.0", "::ffff:11.0.0.1", "10.0.0", None]
    assert find(lists, *inside, at=8) == [True] * 8
    assert find(lists, *inside, at=9) == [False] * 8
    assert find(lists, *outside) == [False] * 8


def test_c11_3_an_address_of_ipv4_is_the_same_address_when_it_is_written_as_ipv6() -> None:
    lists = Lists.empty().apply([insert("::ffff:192.0.2.0/120", kind="cidr"), insert("::ffff:7.7.7.7", kind="cidr")])
    assert find(lists, "192.0.2.7", "::ffff:192.0.2.7", "192.0.3.7", "7.7.7.7") == [True, True, False, True]
    all_of_ipv6 = Lists.empty().apply([insert("::/0", kind="cidr")])
    assert find(all_of_ipv6, "::ffff:192.0.2.7", "192.0.2.7", "2001:db8::1") == [True, False, True]


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("192.0.2.*", "192.0.2.0/24"), ("10.*", "10.0.0.0/8"), ("10.1.*.*", "10.1.0.0/16"), (" 192.0.2.7", "192.0.2.7"),
        ("192.0.2.0/24 ", "192.0.2.0/24"), ("192.0.2.0-192.0.2.255", "192.0.2.0/24"), ("192.0.2.7:443", "192.0.2.7"),
        ("192.0.2.4 - 192.0.2.6", "192.0.2.4/31 and 192.0.2.6/32"), ("[2001:db8::1]:443", "2001:db8::1"),
        ("2001:db8::-2001:db8::1", "2001:db8::/127"), ("home", "an address or a range such as 10.0.0.0/8"),
        ("10.0.0.300", "an address or a range such as 10.0.0.0/8"), ("*", "an address or a range such as 10.0.0.0/8"),
        ("10.*.0.1", "an address or a range such as 10.0.0.0/8"), ("10.0.0.9-10.0.0.1", "an address or a range such as 10.0.0.0/8"),
        ("10.0.0.1-::1", "an address or a range such as 10.0.0.0/8"), ("", "an address or a range such as 10.0.0.0/8"),
        ("::ffff:10.0.0.0/8", "10.0.0.0/8"), ("::ffff:10.0.0.0/90", "an address or a range such as 10.0.0.0/8"),
    ],
)  # fmt: skip
def test_c11_3_what_is_no_range_is_explained_with_what_to_write(text: str, remedy: str) -> None:
    problem = f"{text!r} is not an address or a range of addresses; write {remedy}"
    assert explain_no_range(text) == problem
    _, problems = read_contents({"l": [1.5, {"value": "10.0.0.0/8", "kind": "cidr"}, text]})
    assert [str(each) for each in problems[1:]] == [f"{problem} (lists.l[2])"]
    _, problems = read_contents({"l": [text]})
    assert not problems


def test_c11_3_a_list_is_one_of_ranges_as_long_as_one_row_says_so() -> None:
    """A plain INSERT leaves the kind NULL."""
    plain = Lists.empty().apply([insert("10.0.0.0/8")])
    assert find(plain, "10.1.1.1", "10.0.0.0/8") == [False, True]
    ranged = plain.apply([insert("192.168.0.0/16", kind="cidr")])
    assert find(ranged, "10.1.1.1", "192.168.3.4") == [True, True]
    again = ranged.apply([delete("192.168.0.0/16", kind="cidr")])
    assert find(again, "10.1.1.1", "192.168.3.4") == [False, False]


_CHANGES = st.lists(
    st.tuples(
        st.booleans(),
        st.sampled_from(["l", "m"]),
        st.sampled_from(["a", "b", "c", "10.0.0.1", "10.0.0.0/30", "10.0.0.0/31"]),
        st.sampled_from([None, 0, 1, 5]),
        st.sampled_from([None, None, "cidr"]),
    ),
    max_size=30,
)


@given(_CHANGES, st.sampled_from([0, 2, 1_000]), st.booleans())
def test_c11_3_lists_equal_plain_rows(changes: list[Any], changed: int, is_saved: bool) -> None:
    """Whatever is inserted and deleted, in whatever portions; changed: so many are kept beside the sorted values."""
    rows, lists = Counter[Any](), Lists.empty()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lists_module, "_MIN_CHANGED", changed)
        patch.setattr(lists_module, "_CHANGED_BY_ROOT", 0)
        for commit, (is_insert, *row) in enumerate(changes):
            is_insert = is_insert or not rows[tuple(row)]  # noqa: PLW2901 - a row that is not there cannot be deleted
            rows[tuple(row)] += 1 if is_insert else -1
            lists = lists.apply([ListChange("insert" if is_insert else "delete", commit, *row)])
            if is_saved:
                lists = Lists.from_bytes(lists.to_bytes())
    assert lists.counts == {
        name: count for name in "lm" if (count := sum(n for row, n in rows.items() if row[0] == name))
    }
    texts = ["a", "b", "10.0.0.0", "10.0.0.1", "10.0.0.3", "10.0.0.0/30"]
    for name in "lm":
        listed = [row for row in rows.elements() if row[0] == name]
        is_ranged = any(kind == "cidr" for _, _, _, kind in listed)
        for at in (-1, 0, 1, 5):
            expected = [
                any((end is None or at < end) and _is_value(text, value, is_ranged) for _, value, end, _ in listed)
                for text in texts
            ]
            assert find(lists, *texts, at=at, name=name) == expected


def _is_value(text: str, value: str, is_ranged: bool) -> bool:
    if text == value:
        return True
    try:
        return is_ranged and ip_address(text) in ip_network(value)
    except ValueError:
        return False


def test_c11_3_selected_lists_are_read_from_a_page_as_they_were() -> None:
    lists = Lists.empty().apply([insert("a", 3), insert("b", name="it's. é"), insert("10.0.0.0/8", kind="cidr")], 12)
    read = Lists.from_bytes(lists.to_bytes())
    assert (read.commit, read.counts) == (12, {"it's. é": 1, "l": 2})
    assert read.select({"l"}).counts == {"l": 2}
    assert find(read, "a", "10.9.9.9", at=2) == [True, True]
    assert Lists.from_bytes(Lists.empty().to_bytes()) == Lists.empty()


def test_c8_a_page_of_lists_that_is_damaged_or_of_another_layout_says_what_to_do() -> None:
    page = Lists.empty().apply([insert("a"), insert("b")]).to_bytes()
    for damaged in (b"", page[:-1], page + b"\0"):
        with pytest.raises(StateError, match="start with a new checkpoint"):
            Lists.from_bytes(damaged)
    empty, no_names = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=object)
    for head, message in (([2, 0, 0], "layout version 2"), ([1, 0, 0], "damaged")):
        with pytest.raises(StateError, match=f"lists/7: .*{message}"):
            Lists.from_bytes(encode_page([np.array(head), no_names, np.array([1]), *[empty] * 5]), "lists/7")
    with pytest.raises(StateError, match="damaged"):
        Lists.from_bytes(encode_page([np.array([1])]))


def _make_large(values: int) -> Lists:
    """A list of so many values with random hashes."""
    random = np.random.default_rng(values)
    low, high = (random.integers(-(2**63), 2**63 - 1, values, dtype=np.int64) for _ in range(2))
    return Lists(1, {"l": _List(_Values.of(low, high, np.full(values, FOREVER)))})


def test_c11_3_to_ask_a_list_of_a_million_and_to_change_it_touches_few_of_them() -> None:
    """To sort or to copy it would take a thousand times as long as with a thousand values; a binary search takes twice."""
    small, large = _make_large(1_000), _make_large(1_000_000)
    asked = from_values(STRING, [f"v{at}" for at in range(200)])
    times = np.zeros(200, dtype=np.int64)

    def seconds_for(lists: Lists) -> float:
        started = time.process_time()
        for number in range(10):
            lists = lists.apply([insert(f"v{number}"), insert(f"w{number}", 5), delete(f"w{number}", 5)])
            assert (times < lists.find_until("l", asked)).sum() == number + 1
        return time.process_time() - started

    assert takes_at_most(4, lambda: seconds_for(small), lambda: seconds_for(large))


def test_c11_3_a_value_takes_24_bytes_and_a_page_no_more() -> None:
    lists = Lists.empty().apply([insert(f"terminal {number}") for number in range(50_000)])
    (values, *others) = lists._lists["l"].tables
    assert sum(each.nbytes for each in (values.low, values.high, values.until)) == 24 * 50_000
    assert all(len(each.low) == 0 for each in others)
    assert len(lists.to_bytes()) < 24 * 50_000


def test_c11_3_contents_are_read_as_people_write_them() -> None:
    rows, problems = read_contents({"l": ["a", 7, {"value": "b", "expires_at": "1970-01-01"}], "m": []})
    assert not problems
    assert rows == {
        "l": [ListChange("insert", 0, "l", *each) for each in (("a", None), ("7", None), ("b", 0))], "m": [],
    }  # fmt: skip
    lists = set_contents(Lists.empty().apply([insert("x"), insert("y", name="m"), insert("z", name="n")]), rows, 4)
    assert (lists.counts, lists.commit) == ({"l": 3, "n": 1}, 4)


@pytest.mark.parametrize(
    ("contents", "problem"),
    [
        (["a"], "lists must be a mapping of lists to their values, such as {known-terminals: [T1, {value: T2, "),
        ({"l": "a"}, "lists.l must be a list of values, such as [T1, T2], got 'a' (lists.l)"),
        ({7: []}, "a list is named by a text, got 7 (lists)"),
        ({" ": []}, "a list is named by a text, got ' ' (lists)"),
        ({"l": [1.5]}, "the value must be a text or a whole number, got 1.5; write it as cast(field as string) gives it (lists.l[0])"),
        ({"l": [True]}, "the value must be a text or a whole number, got True; "),
        ({"l": ["a", {"valu": "b"}]}, "unknown key 'valu'; did you mean 'value'? (lists.l[1])"),
        ({"l": [{"value": "b", "kind": "ip"}]}, "unknown kind 'ip'; write cidr for ranges of addresses, or leave it out (lists.l[0])"),
        ({"l": [{"value": "b", "expires_at": "soon"}]}, "expires_at must be a time such as '2026-01-31T12:00:00Z', got 'soon' (lists.l[0])"),
    ],
)  # fmt: skip
def test_c11_3_contents_that_are_none_are_refused_with_their_place(contents: Any, problem: str) -> None:
    _, problems = read_contents(contents)
    assert str(problems[0]).startswith(problem)
