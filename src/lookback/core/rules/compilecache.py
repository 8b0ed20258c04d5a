"""Compiles the documents of rules, each once for all shards of a process."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import replace

from lookback.core.errors import Problem, RuleError
from lookback.core.rules.changes import Rejected
from lookback.core.rules.compiled import CompiledRule
from lookback.core.rules.compiling import compile_rule
from lookback.core.rules.document import read_document
from lookback.core.rules.problems import quote_value
from lookback.core.rules.quarantine import NOT_THE_RULES, describe_error
from lookback.core.rules.versions import Entry
from lookback.core.streams.declaration import Stream
from lookback.core.values.limits import LIMITS, WIDEST_LIMITS, Limits

# Rules cached per declaration, for all shards of a process: the maximum in force, and room for replaced versions.
_MAX_COMPILED, _MAX_DECLARATIONS = LIMITS["rules"].most + 2_000, 100


class RuleCompiler:
    """Compiles documents for the declared streams."""

    def __init__(self, streams: Mapping[str, Stream]) -> None:
        # The keys of the cache of compiled rules, which all compilers of a process share.
        self._declarations = {name: json.dumps(stream.to_dict()) for name, stream in streams.items()}
        self._unlimited = {
            name: json.dumps(replace(stream, limits=WIDEST_LIMITS).to_dict()) for name, stream in streams.items()
        }
        self._widest = Limits(document_bytes=max(each.limits.document_bytes for each in streams.values()))

    def find_stream(self, document: str | None) -> str:
        """Returns the stream that a document names. Raises Rejected and RuleError."""
        name = read_document(document, self._widest).get("stream")
        if not isinstance(name, str) or name not in self._declarations:
            known = ", ".join(sorted(self._declarations))
            raise Rejected(f"unknown stream {quote_value(name)}; known: {known} (stream)")
        return name

    def compile_document(
        self, stream: str, document: str, *, limited: bool = True, lane: int = 0
    ) -> CompiledRule | RuleError:
        """Compiles a document; returns the error of one that is wrong. `limited` applies the stream's limits."""
        declarations = self._declarations if limited else self._unlimited
        return _open_compiler(declarations[stream])(document, lane)

    def check(self, stream: str, document: str, rule_id: str | None, *, limited: bool) -> None:
        """Checks that a document is that of a rule. Raises Rejected and RuleError."""
        compiled = self.compile_document(stream, document, limited=limited)
        if isinstance(compiled, RuleError):
            raise RuleError(compiled.name, compiled.problems)
        if compiled.spec.rule_id != rule_id:
            raise Rejected(
                f"the document has rule_id {compiled.spec.rule_id!r}, the row {rule_id!r}; make them equal (rule_id)"
            )

    def compile_in_force(self, entry: Entry) -> CompiledRule | RuleError:
        """Compiles the rule of an entry; a rule in force stays valid when the stream's limits are lowered."""
        compiled = self.compile_document(entry.stream, entry.document, lane=entry.lane)
        if isinstance(compiled, RuleError):
            compiled = self.compile_document(entry.stream, entry.document, limited=False, lane=entry.lane)
        return compiled

    def has_same_states(self, entry: Entry, rule: CompiledRule) -> bool:
        """Returns whether an entry's rule keeps the same state as another rule."""
        other = self.compile_document(entry.stream, entry.document)
        return isinstance(other, CompiledRule) and (other.needs, other.measured) == (rule.needs, rule.measured)


@functools.lru_cache(maxsize=_MAX_DECLARATIONS)
def _open_compiler(declaration: str) -> Callable[[str, int], CompiledRule | RuleError]:
    """Returns a cached function that compiles documents in a lane for a declared stream."""
    stream = Stream.from_dict(json.loads(declaration))
    # A document may be in two lanes.
    return functools.lru_cache(maxsize=2 * _MAX_COMPILED)(functools.partial(_compile, stream))


def _compile(stream: Stream, document: str, lane: int) -> CompiledRule | RuleError:
    try:
        read = read_document(document)
        return compile_rule(read, stream, lane=lane) if lane else compile_rule(read, stream)
    except RuleError as error:
        # A new error, since the cache would keep the stack frames of the raised one in memory.
        return RuleError(error.name, error.problems)
    except NOT_THE_RULES:
        raise
    except Exception as error:  # noqa: BLE001 - a rule that cannot be read must not stop other rules
        return RuleError("?", [Problem("", f"the document cannot be read: {describe_error(error)}; rewrite the rule")])
