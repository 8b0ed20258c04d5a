"""Turns Spark's and Kafka's errors about a topic into messages with a remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from lookback.core.errors import SetupError
from lookback.spark.platform.faults import collect_messages

if TYPE_CHECKING:
    from lookback.core.streams.declaration import Stream
    from lookback.spark.ingest.kafka import Topic

_MAX_CHARACTERS = 300
_LOSS = re.compile(r"KAFKA_DATA_LOSS|Some data may have been lost|failOnDataLoss")
_SKIP = (
    ". Lost records cannot be ingested; to skip them, run lookback ingest STREAM --skip-lost. To prevent this, make "
    "the topic's retention (retention.ms) longer than the longest pause of this ingest"
)
BEGIN_ANEW = "Begin with another --checkpoint; events already in the table are not ingested twice"
# Patterns of Spark's messages, and the sentences that name the lost records.
_LOST: dict[str, Callable[[re.Match[str]], str]] = {
    r"Could not read records in offset \[(\d+), (\d+)\) for topic partition (\S+)\s": lambda m: (
        f"the next records of partition {m[3]} are those from offset {m[1]} up to {m[2]}, but at least the first of "
        "them was deleted, by retention or by a person, before it was read" + _SKIP
    ),
    r"Starting offset for (\S+) was (\d+) but consumer reset to (\d+)": lambda m: (
        f"the records of partition {m[1]} from offset {m[2]} up to {m[3]} were deleted" + _SKIP
    ),
    r"Partition (\S+?)(?:'s)? offset was changed from (\d+) to (\d+)": lambda m: (
        f"partition {m[1]} was read up to offset {m[2]} and now ends at {m[3]}: the topic was deleted and created again. "
        + BEGIN_ANEW
    ),
    r"Added partition (\S+) starts from (\d+) instead of 0": lambda m: (
        f"the first {m[2]} records of the new partition {m[1]} were deleted before they were read" + _SKIP
    ),
    r"(?:Partitions|offsets for partitions)\s+([\s\S]{1,300}?)(?:\.\s+They\s+may)?\s+have\s+been\s+deleted": lambda m: (
        f"the topic no longer has partitions {' '.join(m[1].split())}, which were read before: it was deleted. "
        + BEGIN_ANEW
    ),
}
_MISSING = re.compile(r"UnknownTopicOrPartitionException|does not host this topic-partition|UnknownTopicIdException")
_REFUSED = re.compile(
    r"((?:Sasl|Ssl|)AuthenticationException|\w*AuthorizationException|SSLHandshakeException|IllegalSaslStateException)"
    r":?\s*([^\n]*)"
)
_AWAY = re.compile(
    r"errors\.TimeoutException|DisconnectException|NetworkException|BrokerNotAvailableException|LeaderNotAvailable"
    r"|NotLeaderOrFollower|CoordinatorNotAvailable|No resolvable bootstrap urls|Cannot fetch record for offset \d+ in"
    r"|org\.apache\.kafka\.common\.errors\.\w*Retriable"
)
_WRONG = re.compile(r"(?:ConfigException|IllegalArgumentException): ([^\n]+)")
_OTHER_SOURCE = re.compile(r"Expected e\.g\. \{\"topicA\"|There are \[?\d+\]? sources in the checkpoint|logOffset")


# Spark reports this for a task's error whose class the driver lacks.
_NO_REASON = "): UnknownReason"


class BrokersAway(Exception):
    """No broker answers, or a partition has no leader. Worth trying again."""


def explain_kafka_failure(error: Exception, topic: Topic, stream: Stream, checkpoint: str) -> Exception:
    """Returns the error to raise for a failed query: one with a remedy if one is known, else the original error.

    Returns BrokersAway if the remedy is to try again. The message never contains secrets from the topic's options.
    """
    text = topic.hide_secrets(collect_messages(error))
    if _LOSS.search(text) and (lost := _find_loss(text)):
        words = lost.replace("ingest STREAM", f"ingest {stream.name}")
        return SetupError(f"{topic}: {words}")
    if _MISSING.search(text):
        return SetupError(
            f"{topic}: the topic does not exist, or this user may not see it. Create it, or correct `topic` in the "
            f"source of stream {stream.name!r}; Lookback does not create topics"
        )
    if refused := _REFUSED.search(text):
        return SetupError(
            f"{topic}: the brokers refuse access ({refused[1]}: {refused[2].strip()[:_MAX_CHARACTERS]}). Correct "
            "kafka.security.protocol, kafka.sasl.* or kafka.ssl.* in the source's options, the secret that they name, "
            "or the user's permissions"
        )
    if away := _AWAY.search(text):
        return BrokersAway(f"no broker could be reached, or a partition has no leader ({_quote_line(text, away)})")
    if wrong := _WRONG.search(text):
        return SetupError(f"{topic}: {wrong[1][:_MAX_CHARACTERS]}: correct the source's options")
    if _OTHER_SOURCE.search(text):
        return SetupError(f"{checkpoint} belongs to another source than {topic}. {BEGIN_ANEW}")
    if _NO_REASON in text:
        return SetupError(
            f"{topic}: a task failed, and Spark could not read the reason, because this session added Kafka support "
            "only after its start. Restart the session with the stream that reads the topic to see the reason"
        )
    return error


def _find_loss(text: str) -> str | None:
    for pattern, words in _LOST.items():
        match = re.search(pattern, text)
        if match:
            return words(match)
    return None


def _quote_line(text: str, match: re.Match[str]) -> str:
    return text[match.start() :].split("\n", 1)[0][:_MAX_CHARACTERS].strip()
