"""Which versions of a rule fill its two roles after a change, and whether a row may fill one."""

from __future__ import annotations

from dataclasses import replace

from lookback.core.rules.changes import MAX_VERSION, GateRejected, Rejected, RuleChange
from lookback.core.rules.document import RULE_ID, STATUSES, is_same_document, read_document
from lookback.core.rules.gate import find_objection
from lookback.core.rules.problems import quote_value
from lookback.core.rules.roles import SHADOW, read_quarantined
from lookback.core.rules.versions import Entry
from lookback.core.streams.declaration import Stream
from lookback.core.values.limits import WIDEST_LIMITS, name_limit


def fill_role(roles: list[Entry], entry: Entry) -> list[Entry]:
    """Returns a rule's entries after a version has come into force, the challenger last.

    The version takes over the lane of the role that it fills. If it changes its role, it keeps its lane. If it becomes active
    or paused where only a shadow was, it takes over the shadow's lane, unless the shadow stays.

    Args:
        roles: The entries before.
        entry: The version that comes into force.
    """
    shadow = next((each for each in roles if each.status == SHADOW), None)
    main = next((each for each in roles if each.is_in_force and each.status != SHADOW), None)
    same = next((each for each in roles if each.version == entry.version), None)
    if not entry.is_in_force:
        return [entry if same is None else replace(entry, lane=same.lane)]
    if entry.status == SHADOW:
        left = None if main is same else main
        lane = next((each.lane for each in (same, shadow) if each is not None), 0 if left is None else 1 - left.lane)
        entry = replace(entry, lane=lane)
        return [entry] if left is None else [left, entry]
    left = shadow if entry.status == "paused" and shadow is not same else None
    taken = (same, main, None if left is not None else shadow)
    lane = next((each.lane for each in taken if each is not None), 0 if left is None else 1 - left.lane)
    entry = replace(entry, lane=lane)
    return [entry] if left is None else [entry, left]


def fill_warmed(roles: list[Entry], entry: Entry) -> list[Entry]:
    """Returns a rule's entries after a version that was warming has come into force, as `fill_role` does.

    A later version in shadow stays beside it.
    """
    later = [each for each in roles if each.status == SHADOW and each.version > entry.version]
    roles = [each for each in roles if each not in later]
    if later and entry.status != SHADOW:
        main, *_ = fill_role([*roles, *later], replace(entry, status="paused"))
        return [replace(main, status=entry.status), *later]
    return fill_role(roles, replace(entry, lane=0))


def end_role(roles: list[Entry], ending: Entry, ended: Entry) -> list[Entry]:
    """Returns a rule's entries after one role has ended; if there is no other role, the rule's entry becomes `ended`."""
    left = [entry for entry in roles if entry.version != ending.version and entry.is_in_force]
    if not left:
        return [ended]
    passed = ended.version if ended.status == "quarantined" else 0
    main = replace(left[0], ended=max(left[0].ended, passed), highest=max(left[0].highest, ended.highest))
    return [main, *left[1:]]


def find_failing(in_force: list[Entry], version: int, evidence: str | None) -> Entry:
    """Finds the version that a quarantined row takes out of service: the one that its evidence names.

    Without evidence it is the version right before the row's, else the active one.

    Raises:
        Rejected: The named version is not in force.
    """
    failing = read_quarantined(evidence)
    if failing is None:
        return next((each for each in in_force if each.version == version - 1), in_force[0])
    for each in in_force:
        if each.version == failing:
            return each
    raise Rejected(f"superseded: version {quote_value(failing)}, which the row quarantines, is not in force (evidence)")


def is_meant(change: RuleChange, entry: Entry) -> bool:
    """Returns whether a deleted row was that of an entry."""
    if change.version is None:
        # The version that the engine gave the row is unknown, but its status and document identify it.
        return is_row_of(entry, change.status, change.document)
    return entry.version == change.version


def is_row_of(entry: Entry, status: str | None, document: str | None) -> bool:
    """Returns whether a row has an entry's status and document, however the JSON is laid out."""
    return entry.status == status and is_same_document(entry.document, document)


def check_gate(change: RuleChange, roles: list[Entry], version: int) -> None:
    """Checks an active row against an enforced gate, unless the same version is in force already. Raises Rejected."""
    if not change.gate or change.status != "active":
        return
    if any(each.version == version and is_row_of(each, "active", change.document) for each in roles):
        return
    document = read_document(change.document, WIDEST_LIMITS)
    if objection := find_objection(document, change.author, change.approved_by, change.evidence, required=change.gate):
        raise GateRejected(
            f"the gate is enforced: version {version} is not active, since {objection}; publish it as a draft, then run "
            f"`lookback rules activate {change.rule_id}`"
        )


def check_version(change: RuleChange, version: int, present: list[Entry], highest: int) -> None:
    """Checks the status and the version of a row.

    Args:
        change: The row.
        version: Its version.
        present: The rule's entries, also those that are warming.
        highest: The highest version of the rule so far.

    Raises:
        Rejected: One of them is wrong, or a later version is in force.
    """
    if change.status not in STATUSES:
        raise Rejected(f"status must be one of {', '.join(STATUSES)}, got {change.status!r:.40} (status)")
    if version < 0:
        raise Rejected(f"version must not be negative, got {version}; insert {highest + 1} or NULL (version)")
    if version >= MAX_VERSION:
        raise Rejected(
            f"version must be less than {MAX_VERSION:,}, got {version:,}; insert {highest + 1} or NULL (version)"
        )
    last = max((max(each.version, each.ended) for each in present), default=-1)
    if change.change == "insert" and last >= version:
        raise Rejected(
            f"superseded: version {version} is not above version {last}, which is in force; "
            f"insert {highest + 1} or NULL (version)"
        )


def check_count(change: RuleChange, roles: list[Entry], stream: Stream, in_force: int) -> None:
    """Checks that a stream does not get more rules than it may have. Raises Rejected.

    Args:
        change: The row.
        roles: The rule's entries.
        stream: The stream of the row.
        in_force: The number of its rules in force.
    """
    replaced = [each for each in roles if each.is_in_force and each.stream == stream.name]
    if change.status == SHADOW:
        replaced = [each for each in replaced if each.status == SHADOW or each.version == change.version]
    if change.status == "draft" or replaced or in_force < stream.limits.rules:
        return
    message = f"stream {stream.name!r} already has {in_force:,} rules in force; retire one first"
    raise Rejected(name_limit(message, "rules"))


def require_rule_id(change: RuleChange) -> str:
    """Returns the rule_id of a row. Raises Rejected for one that no rule can have."""
    rule_id = change.rule_id
    if not (isinstance(rule_id, str) and RULE_ID.fullmatch(rule_id)):
        raise Rejected(
            f"rule_id must have 1 to 100 characters of a-z, 0-9, '.', '_' and '-', got {rule_id!r:.120} (rule_id)"
        )
    return rule_id
