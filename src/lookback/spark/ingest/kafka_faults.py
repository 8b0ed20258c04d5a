"""Turns the errors of Spark and Kafka about a topic that cannot be read into sentences with a remedy."""

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
    ". Lost records cannot be ingested; to go on with the others: lookback ingest STREAM --skip-lost. To keep this from "
    "happening again, let the topic keep records for longer (retention.ms) than this ingest is ever away"
)
BEGIN_ANEW = "Begin with another --checkpoint; events that are in the table already are not taken in twice"
# Patterns of Spark's messages, and the sentence that says which records are lost.
_LOST: dict[str, Callable[[re.Match[str]], str]] = {
    r"Could not read records in offset \[(\d+), (\d+)\) for topic partition (\S+)\s": lambda m: (
        f"the next records of partition {m[3]} are those from offset {m[1]} up to {m[2]}, and at least the first of them is "
        "deleted: retention, or a person, was faster than this ingest" + _SKIP
    ),
    r"Starting offset for (\S+) was (\d+) but consumer reset to (\d+)": lambda m: (
        f"the records of partition {m[1]} from offset {m[2]} up to {m[3]} are deleted" + _SKIP
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
    """No broker answers, or none that leads a partition; it may be there again soon."""


def explain_kafka_failure(error: Exception, topic: Topic, stream: Stream, checkpoint: str) -> Exception:
    """Returns the error to raise in place of a failed query's: with a remedy if one is known, else the error itself.

    BrokersAway if the remedy is to try again. The message contains no secret of the topic's options.
    """
    text = topic.hide_secrets(collect_messages(error))
    if _LOSS.search(text) and (lost := _find_loss(text)):
        words = lost.replace("ingest STREAM", f"ingest {stream.name}")
        return SetupError(f"{topic}: {words}")
    if _MISSING.search(text):
        return SetupError(
            f"{topic}: there is no such topic, or this user may not see it. Create it, or mend `topic` in the source of "
            f"stream {stream.name!r}; Lookback creates none"
        )
    if refused := _REFUSED.search(text):
        return SetupError(
            f"{topic}: the brokers refuse ({refused[1]}: {refused[2].strip()[:_MAX_CHARACTERS]}). Mend kafka.security.protocol, "
            "kafka.sasl.* or kafka.ssl.* in the source's options, the secret that they name, or what the user is allowed"
        )
    if away := _AWAY.search(text):
        return BrokersAway(f"no broker could be reached or leads ({_quote_line(text, away)})")
    if wrong := _WRONG.search(text):
        return SetupError(f"{topic}: {wrong[1][:_MAX_CHARACTERS]}: mend the source's options")
    if _OTHER_SOURCE.search(text):
        return SetupError(f"{checkpoint} was made from another source than {topic}. {BEGIN_ANEW}")
    if _NO_REASON in text:
        return SetupError(
            f"{topic}: a task failed, and Spark could not read why: this session learned to read Kafka only after it had "
            "begun. Start it anew with the stream that reads the topic, which then says more"
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
