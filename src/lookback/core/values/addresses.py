"""Addresses and ranges of addresses, such as 10.0.0.0/8: how a text is read, and what to write instead of a wrong one."""

from __future__ import annotations

from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network, summarize_address_range

# The number of bits of an address, by version.
ADDRESS_BITS = {4: 32, 6: 128}
# The prefix of the IPv6 addresses that stand for those of IPv4, ::ffff:0:0/96.
_MAPPED_BITS = 96
# A first and last address are shown as at most this many ranges.
_MAX_SUGGESTED = 8


@lru_cache(maxsize=100_000)
def read_address(text: str) -> dict[int, int]:
    """Reads an address as its number by version; nothing for any other text.

    An IPv4 address that is written as IPv6, such as ::ffff:192.0.2.7, has a number in both.
    """
    try:
        address = ip_address(text)
    except ValueError:
        return {}
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    numbers: dict[int, int] = {address.version: int(address)}
    return numbers if mapped is None else {**numbers, 4: int(mapped)}


def read_network(text: str) -> tuple[int, int, int] | None:
    """Reads a range of addresses as its version, first number and length of prefix; None for any other text."""
    try:
        network = ip_network(text, strict=False)
    except ValueError:
        return None
    first = network.network_address
    if _read_mapped(text.partition("/")[0]) is None:
        return network.version, int(first), network.prefixlen
    # Of ::ffff:10.0.0.0/8 the 8 bits are those of IPv6: nearly all addresses, and not what is meant.
    if network.prefixlen < _MAPPED_BITS:
        return None
    return 4, int(first) % 2 ** ADDRESS_BITS[4], network.prefixlen - _MAPPED_BITS


def _read_mapped(text: str) -> IPv4Address | None:
    """Reads the IPv4 address that is written as IPv6, such as ::ffff:192.0.2.7; None for any other text."""
    try:
        address = ip_address(text)
    except ValueError:
        return None
    return address.ipv4_mapped if isinstance(address, IPv6Address) else None


def explain_no_range(text: str) -> str | None:
    """Explains why a text is not an address or a range of addresses, and what to write; None if it is one."""
    if read_network(text) is not None:
        return None
    ranges = _suggest_ranges(text.strip())
    remedy = " and ".join(ranges) if ranges else "an address or a range such as 10.0.0.0/8"
    return f"{text!r:.60} is not an address or a range of addresses; write {remedy}"


def _suggest_ranges(text: str) -> list[str]:
    """Returns the ranges that are meant by a text with blanks, wildcards, a first and last address, or a port."""
    if read_network(text) is not None:
        return [text]
    address, _, length = text.partition("/")
    if (mapped := _read_mapped(address)) is not None:
        text = f"{mapped}/{length}"
        return [text] if read_network(text) is not None else []
    octets = text.split(".")
    known = [each for each in octets if each != "*"]
    if 1 <= len(known) < len(octets) <= 4 and octets[: len(known)] == known:
        text = f"{'.'.join(known + ['0'] * (4 - len(known)))}/{8 * len(known)}"
        return [text] if read_network(text) is not None else []
    try:
        first, dash, last = text.partition("-")
        if dash:
            ends = ip_address(first.strip()), ip_address(last.strip())
            ranges = [str(each) for each in summarize_address_range(*ends)]
            return ranges if len(ranges) <= _MAX_SUGGESTED else []
        host, _, port = text.rpartition(":")
        return [str(ip_address(host.strip("[]")))] if port.isdecimal() else []
    except (ValueError, TypeError):
        return []


def name_network(version: int, number: int, length: int) -> str:
    """Returns the name of a range, the same however its text is written."""
    return f"{version}/{number}/{length}"
