"""Regular expressions without Spark: what they find and take, what is refused and why, and that time is linear."""

from __future__ import annotations

import pytest

from lookback.core.errors import ExpressionError
from lookback.core.expressions.compiling import compile_expression
from lookback.core.expressions.like import quote_text
from lookback.core.rules.compiling import compile_rule
from lookback.core.streams.declaration import Stream
from lookback.core.values.columns import from_values
from lookback.core.values.types import STRING
from lookback.testing.harness import Harness

STREAM = Stream.from_dict(
    {"stream": "s", "event_id": "id", "event_time": "at", "fields": {"id": "string", "at": "timestamp", "text": "string"}}
)  # fmt: skip


def evaluate(expression: str, *texts: str | None) -> list[object]:
    compiled = compile_expression(expression, {"text": STRING})
    column = compiled.evaluate({"text": from_values(STRING, list(texts))}, len(texts))
    assert column.error is None
    return [column.item(row) for row in range(len(texts))]


def matches(pattern: str, *texts: str | None) -> list[object]:
    return evaluate(f"text rlike {quote_text(pattern)}", *texts)


def take(pattern: str, group: int, *texts: str | None) -> list[object]:
    return evaluate(f"regexp_extract(text, {quote_text(pattern)}, {group})", *texts)


def refusal(expression: str) -> str:
    with pytest.raises(ExpressionError) as caught:
        compile_expression(expression, {"text": STRING})
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize(
    "form", ["text rlike {}", "text regexp {}", "rlike(text, {})", "regexp(text, {})", "REGEXP_LIKE(text, {})"]
)
def test_c12_3_every_form_of_a_match_is_the_same_and_null_gives_null(form: str) -> None:
    expression = compile_expression(form.format("'b+'"), {"text": STRING})
    assert expression.sql == "regexp_like(text, 'b+')"
    assert expression.is_readable
    assert evaluate(form.format("'b+'"), "abbc", "ac", "", None) == [True, False, False, None]
    assert evaluate("text not rlike '^a'", "abc", "b", None) == [False, True, None]


def test_c12_3_a_long_run_of_one_set_is_found_where_it_is_long_enough() -> None:
    texts = [
        "a" * 99,
        "a" * 100,
        "b" + "a" * 100 + "b",
        "a" * 99 + "\n" + "a" * 99,
        "a" * 50 + "é" + "a" * 50,
        None,
        "?" * 99 + "\ud800",
    ]
    assert matches("a{100,}", *texts) == [False, True, True, False, False, None, False]
    assert matches(".{100,}", *texts) == [False, True, True, False, True, None, True]
    assert matches("(?s).{100,200}", *texts) == [False, True, True, True, True, None, True]
    assert matches("[?]{100}", *texts) == [False] * 5 + [None, True]
    # With anything beside the run, RE2 looks.
    assert matches("b[^b]{100}", *texts) == [False, False, True, False, False, None, False]
    assert matches("a{100}$", *texts) == [False, True, False, False, False, None, False]


def test_c12_3_other_tests_of_texts() -> None:
    assert evaluate("text ilike any ('CMD%', '%.Ps1')", "cmd.exe", "a.PS1", "sh", None) == [True, True, False, None]
    assert evaluate("text like any ('cmd%', '%.ps1')", "cmd.exe", "a.PS1") == [True, False]
    assert evaluate("text ilike 'c_D%'", "CMD.exe") == [True]
    inside = evaluate(
        "cidr_match(text, '10.0.0.0/8', '2001:db8::/32')", "10.1.2.3", "::ffff:10.0.0.1", "x", "2001:db8::1"
    )
    assert inside == [True, True, None, True]


def test_c12_3_extract_gives_a_group_of_the_first_match() -> None:
    pattern = "([a-z]+)=(?<value>[0-9]+)?"
    texts = ("x; id=7; n=8", "id=", "7", "", None)
    assert take(pattern, 1, *texts) == ["id", "id", "", "", None]
    assert take(pattern, 2, *texts) == ["7", "", "", "", None]
    assert take(pattern, 0, *texts) == ["id=7", "id=", "", "", None]
    assert evaluate(f"regexp_extract(text, '{pattern}')", *texts) == take(pattern, 1, *texts)
    # Leftmost, then the first alternative, as greedy as it says.
    assert take("(a|ab)(c|bcd)?", 0, "xabcd") == ["abcd"]
    assert take("(a+?)(a*)", 2, "aaa") == ["aa"]
    assert take("(?:(a)x)?b", 1, "axb", "ab") == ["a", ""]
    assert take("((?:a|b)+)c", 1, "xabc") == ["ab"]


LINE_ENDS = ["\n", "\r", "\r\n", "\x85", "\u2028", "\u2029"]


def test_c12_3_ends_of_lines_are_those_of_java() -> None:
    assert matches("^b$", *("b" + end for end in LINE_ENDS)) == [True] * 6
    assert matches("b$", "b\n\n", "b\n\r", "b\r\nx", "b\v", "b") == [False, False, False, False, True]
    # Not between \r and \n.
    assert matches(r"\r$", "b\r", "b\r\r", "b\r\n", "\r") == [True, True, False, True]
    assert matches(r"\Ab\Z|\Ac\z", "b\r\n", "c\n", "c") == [True, False, True]
    assert matches("a.b", *(f"a{end}b" for end in LINE_ENDS), "a\vb", "a😀b") == [False] * 6 + [True, True]
    assert matches("(?s)a.b", "a\nb", "a\r\nb") == [True, False]
    assert take("[^/]+$", 0, "/etc/passwd\n", "/etc/passwd\r\n", "a/b") == ["passwd\n", "passwd\r\n", "b"]
    assert take("(b+)$", 1, "abb\r\n", "abb", "ab\nb\n") == ["bb", "bb", "b"]
    assert take("b+$", 0, "abb\r\n", "abb\u2028") == ["bb", "bb"]


def test_c12_3_letters_and_digits_are_those_of_ascii() -> None:
    assert matches("(?i)^k$", "k", "K", "\u212a") == [True, True, False]
    assert matches("(?i)^[^k-s]$", "K", "\u017f", "\u212a", "t") == [False, True, True, True]
    assert matches("(?i)ä", "ä", "Ä") == [True, False]
    assert matches("(?i:a)b(?-i)", "Ab", "AB") == [True, False]
    assert matches(r"^\w\d$", "a1", "ä1", "a\u0661") == [True, False, False]
    assert matches(r"\s", "\v", "\u00a0", "\u2003") == [True, False, False]
    assert matches(r"\bcmd\b", "a cmd.exe", "cmds", "äcmd") == [True, False, True]


def test_c12_3_characters_by_code_and_by_class() -> None:
    assert matches(r"^\x41\x{1F600}\u00e9\012\07\t\e\Q.*\E$", "A😀é\n\x07\t\x1b.*") == [True]
    assert matches(r"^[\w.-]+[a\-z-]$", "a.b-", "a.by") == [True, False]
    assert matches(r"^[\p{Punct}\P{ASCII}]$", "!", "ä", "a") == [True, True, False]
    assert matches(r"^[\x00-\x1f]$", "\0", "\x1f", " ") == [True, True, False]
    assert matches("]}", "a]}") == [True]
    assert matches("", "", "a", None) == [True, True, None]
    assert matches(r"[^\w\W]", "a", "") == [False, False]


@pytest.mark.parametrize(
    ("pattern", "place", "remedy"),
    [
        ("a(?=b)", "a look-ahead at character 2, '(?=b)'", "with and"),
        ("a(?!b)", "a look-ahead at character 2", "and not"),
        ("(?<=a)b", "a look-behind at character 1", "regexp_extract"),
        ("(?<!a)b", "a look-behind at character 1", "and not"),
        ("(?>a)", "an atomic group at character 1", "use (?:...)"),
        ("(?P<n>a)", "a named group as Python writes it at character 1", "(?<name>...)"),
        ("(?<n>a)(?<n>b)", "a second group named n at character 8", "its own name"),
        ("(?'n'a)", "a group that Java does not know at character 1", "(?:...)"),
        (r"(a)\1", r"a back-reference at character 4, '\\1'", "once more"),
        (r"(?<n>a)\k<n>", "a back-reference at character 8", "once more"),
        ("a++", "a possessive repeat at character 2", "leave the second + out"),
        ("a**", "a repeat of a repeat at character 2", "(?:...)"),
        ("a{2}{3}", "a repeat of a repeat at character 2", "(?:...)"),
        ("a{1001}", "more than 1,000 repeats at character 2", "* or +"),
        ("a{99999999999999999999}", "more than 1,000 repeats", "* or +"),
        ("a{3,2}", "bounds are the wrong way round at character 2", "smaller number first"),
        ("a{,2}", "a { that is not a number of repeats at character 2", r"\{"),
        ("{a}", "a { that is not a number of repeats at character 1", r"\{"),
        ("*a", "* with nothing to repeat at character 1", r"\*"),
        ("^*", "a place that is repeated at character 2", "leave the repeat out"),
        ("(a", "a ( that is not closed at character 1", r"\("),
        ("a)", "a ) without ( at character 2", r"\)"),
        ("[a", "a [ that is not closed at character 1", r"\["),
        ("[]a]", "a ] as the first character of a class at character 2", r"\]"),
        ("[a[b]]", "a class in a class at character 3", r"\["),
        ("[[:alpha:]]", "a class in a class at character 2", r"\["),
        ("[a-z&&[b]]", "an intersection of classes at character 5", r"\&"),
        ("[z-a]", "a range that does not go from a character to a later one at character 2", r"\-"),
        (r"[a-\d]", "a range that does not go from a character to a later one at character 2", r"\-"),
        ("[a--]", "a range that does not go from a character to a later one at character 2", r"\-"),
        ("[--a]", "two - in a class at character 2", r"\-"),
        (r"\p{L}", "the class L, which differs by version of Unicode at character 1", "such as [a-z]"),
        (r"\pL", "the class L, which differs by version of Unicode at character 1", "such as [a-z]"),
        (r"(?i)\p{Lower}", "Lower with the flag i, which differs by version of Java at character 5", r"\p{Alpha}"),
        (r"\h", r"\h at character 1", "list the characters"),
        (r"\R", r"\R at character 1", r"(?:\r\n|[\n\r])"),
        (r"a\Gb", r"\G at character 2", "use ^"),
        (r"\B", r"\B at character 1", "beside it"),
        (r"\b{g}", r"\b at character 1", ""),
        (r"[\b]", r"\b in a class at character 2", ""),
        (r"a\E", r"\E without \Q at character 2", "leave it out"),
        ("a\\", "a backslash at its end at character 2", r"\\"),
        (r"\uD83D\uDE00", "a code that is not a character at character 1", r"\x{...}"),
        ("(?x)a b", "the flag x at character 1", "leave out spaces"),
        ("(?m)^a", "^ with the flag m at character 5", r"[\n\r]"),
        ("(?m:a$)", "$ with the flag m at character 6", r"[\n\r]"),
        ("a$b", "a place at the end of the text with something behind it at character 2", r"\z"),
        ("(a$)*", "a place at the end of the text with something behind it at character 3", r"\z"),
    ],
)  # fmt: skip
def test_c12_3_what_re2_lacks_or_reads_otherwise_is_refused_with_its_place(
    pattern: str, place: str, remedy: str
) -> None:
    problem = refusal(f"text rlike {quote_text(pattern)}")
    assert problem.startswith("regexp_like(): the pattern has ")
    assert place in problem
    assert remedy in problem.partition("; ")[2]


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        ("regexp_extract(text, 'a')", "regexp_extract(): the pattern 'a' has no group, so there is no group 1; take 0, the whole match"),
        ("regexp_extract(text, '(a)(b)', 3)", "regexp_extract(): the pattern '(a)(b)' has 2 groups, so there is no group 3; take 0, the whole match, or a group up to 2"),
        ("regexp_extract(text, '(a)', -1)", "regexp_extract(): the pattern '(a)' has 1 group, so there is no group -1; take 0, the whole match, or a group up to 1"),
        ("regexp_extract(text, '(a)', length(text))", "regexp_extract() takes the number of a group as an integer literal, got length(text)"),
        ("regexp_extract(text, '(a$)')", r"regexp_extract(): the pattern has a $ in the extracted group at character 3, '$)'; put it behind the group and at the end of the pattern, or use \z, the end of the text"),
        ("regexp_extract(text, '(a*)*')", "regexp_extract(): the pattern has a repeat of what can be empty at character 5, '*'; let each repeat take at least one character"),
        ("regexp_extract(text, '(?:(a)b)*')", "regexp_extract(): the pattern has a repeat around the extracted group at character 9, '*'; put the repeat into the group: ((?:...)*)"),
        ("text rlike text", "regexp_like() takes its pattern as a literal text or a parameter of the rule, got text"),
        ("text rlike null", "regexp_like() takes its pattern as a literal text or a parameter of the rule, got null"),
        ("5 rlike 'a'", "regexp_like() takes a string, but '5' is of type int; cast it"),
    ],
)  # fmt: skip
def test_c12_3_a_wrong_call_is_refused_with_a_remedy(call: str, problem: str) -> None:
    assert refusal(call) == problem


def test_c12_3_a_pattern_may_be_a_parameter() -> None:
    rule = {"rule_id": "r", "stream": "s", "when": "text rlike :names", "parameters": {"names": "^(svc|adm)-"}}
    harness = Harness(STREAM)
    harness.rule(rule)
    harness.events([{"id": text, "at": 5, "text": text} for text in ("svc-1", "user", "adm-2")])
    assert [alert.event_id for alert in harness.alerts] == ["svc-1", "adm-2"]


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|a)*b", "(a*)*b", "(?:a?){500}a{500}b", "^(.*?,){11}P"])
def test_c12_3_time_is_linear_in_the_text(pattern: str) -> None:
    """An engine that backtracks would not end."""
    assert matches(pattern, "a" * 50_000 + "!") == [False]


@pytest.mark.parametrize(
    "pattern", ["(?:.{1000}){3}", "a{1000}" * 3, "((a{40}){40}){2}", "(?:(?:a?){1000}){1000}", "(" * 101 + ")" * 101]
)
def test_c12_3_a_pattern_that_is_too_large_is_refused(pattern: str) -> None:
    assert "; " in refusal(f"text rlike {quote_text(pattern)}")
    with pytest.raises(Exception, match=r"regexp_like\(\)"):
        compile_rule({"rule_id": "r", "stream": "s", "when": f"text rlike {quote_text(pattern)}"}, STREAM)


def test_c12_3_any_text_gives_a_value() -> None:
    texts = ["\0", "\ud800", "a\udfff", "\U0010ffff", "\ufffe", "x" * 1_000_000, "\r\n", "\n" * 10]
    for pattern in (".", "(?s)^.*$", "[^a]$", "(?i)x+$"):
        assert None not in matches(pattern, *texts)
        assert None not in take(pattern, 0, *texts)
    assert matches(".") == []


def test_c12_3_a_raw_text_keeps_its_backslashes() -> None:
    assert evaluate(r"text rlike r'^\d+\.exe$'", "12.exe", "ab.exe") == [True, False]
    assert compile_expression(r'R"\d"', {}).sql == compile_expression(r"'\\d'", {}).sql == r"'\\d'"
    assert compile_expression(r"r'a\tb'", {}).sql == r"'a\\tb'"
    with pytest.raises(ExpressionError):
        compile_expression(r"text = r'it\'s'", {"text": STRING})
