"""Values of forgotten events within texts: in which forms they are found, and what is left alone. No Spark is needed here."""

from __future__ import annotations

from lookback.core.streams.alerts import REMOVED
from lookback.spark.operations.redaction import OwnValue, Redactor, list_identifying, select_texts
from payins import STREAM


def redactor(**values: str) -> Redactor:
    """A redactor for a request that names the field `customer`."""
    own = [OwnValue(*pair) for pair in values.items()]
    return Redactor(select_texts(own, list_identifying(STREAM, []), ["customer"]))


def test_a_short_value_counts_only_if_the_request_names_its_field_and_stands_alone() -> None:
    redact = redactor(shop="abc", customer="17", amount="9.5").redact
    assert redact("17 of 170, 1.17 and x17 in abc for 9.5") == f"{REMOVED} of 170, 1.17 and x17 in abc for 9.5"
    assert redact(None) is None


def test_a_value_is_found_as_json_python_and_an_average_write_it() -> None:
    redact = redactor(shop='Ann "O\'Neil"\nfrom Łódź', amount="98765.43").redact
    for text in (
        'ann "o\'neil"\nFROM łódź',
        '["Ann \\"O\'Neil\\"\\nfrom \\u0141\\u00f3d\\u017a"]',
        "shop='Ann \"O\\'Neil\"\\nfrom Łódź'",
        "in98765.4300of",
    ):
        assert REMOVED in (redact(text) or ""), text
    assert redact("198765.43 and 98765.431") == "198765.43 and 98765.431"


def test_a_measure_becomes_null_and_the_message_says_that_something_is_gone() -> None:
    row = redactor(amount="98765.43").redact_row({"n": "3", "top": "98765.43", "none": None}, "3 in a")
    assert row == ({"n": "3", "top": None, "none": None}, f"3 in a {REMOVED}")
