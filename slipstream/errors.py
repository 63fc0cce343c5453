"""The one error tree. Each class names its gRPC status and its exit status; nothing here imports gRPC."""

import errno
from enum import StrEnum
from typing import ClassVar

MAX_MESSAGE_CHARS = 2000
"""A message may repeat what it complains of, which may be long; logs, queues and terminals get no more than this."""


class SlipstreamError(Exception):
    """Base of every error that a user may see. The message says what is wrong and what to do about it."""

    status: ClassVar[str] = "INTERNAL"
    """Name of the `grpc.StatusCode` that a service answers with."""
    exit_code: ClassVar[int] = 1
    """Exit status of a command line that ends with this error."""
    retry_after_s: float | None = None
    """When the same request may succeed, as far as can be guessed."""
    ceiling: str = ""
    """Which of the service's ceilings was reached, if one was: a word of our own, never the caller's."""

    def __str__(self) -> str:
        message = super().__str__()
        return message if len(message) <= MAX_MESSAGE_CHARS else f"{message[: MAX_MESSAGE_CHARS - 3]}..."


def with_notes(error: SlipstreamError) -> str:
    """With what is known of it beside its message, which a server tells no caller."""
    return ": ".join((str(error), *getattr(error, "__notes__", ())))


class InvalidRequest(SlipstreamError):
    """The request contradicts itself or a documented range."""

    status = "INVALID_ARGUMENT"
    exit_code = 2


class UnreadableMedia(InvalidRequest):
    """A service finds that the bytes are no video, and no document, that it can read."""


class UnreadableVideo(UnreadableMedia):
    """The bytes are no video that can be decoded: wrong format, damaged, empty, or without a video stream."""

    exit_code = 3


class UnreadableDocument(UnreadableMedia):
    """The bytes are no document that can be read: wrong format, damaged, empty, or behind a password."""

    exit_code = 3


class VideoNotFound(SlipstreamError):
    """The path does not exist below the allowed roots."""

    status = "NOT_FOUND"
    exit_code = 3


class ObjectNotFound(SlipstreamError):
    """The store has no object of that address."""

    status = "NOT_FOUND"
    exit_code = 3


class ObjectChanged(SlipstreamError):
    """An object is not the one any more that was begun."""

    status = "ABORTED"
    exit_code = 4


class LimitExceeded(SlipstreamError):
    """The request is well formed but larger than this server serves."""

    status = "OUT_OF_RANGE"
    exit_code = 2


class InvalidConfig(SlipstreamError):
    """A start-up option is unknown, malformed or impossible here."""

    status = "FAILED_PRECONDITION"
    exit_code = 2


class ModelNotUsable(InvalidConfig):
    """A checkpoint is missing, unsafe, of an unknown architecture, or does not fit its partner."""


class VersionMismatch(InvalidConfig):
    """Two services are of releases whose protocols do not meet. The message says which one to upgrade."""


class SessionGone(SlipstreamError):
    """The session was never opened here, has ended, or was cancelled."""

    status = "NOT_FOUND"


class SessionExists(InvalidRequest):
    """A session of that name is open already; it may be another caller's."""

    status = "ALREADY_EXISTS"


class SessionIdle(SlipstreamError):
    """The caller left its call open, and said nothing or took nothing of what it is sent for too long."""

    status = "ABORTED"
    exit_code = 4


class Overloaded(SlipstreamError):
    """No room for another caption now; the same request may succeed later."""

    status = "RESOURCE_EXHAUSTED"
    exit_code = 4

    def __init__(self, message: str, *, retry_after_s: float | None = None, ceiling: str = "") -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.ceiling = ceiling


_LACKS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_NO_THREAD = "can't start new thread"
"""Python's own words."""


def machine_lacks(error: BaseException) -> Overloaded | None:
    """What to tell of an error that says nothing of the request, but that the machine has no descriptor, memory or
    thread left for now; None for any other."""
    is_lack = isinstance(error, OSError) and error.errno in _LACKS
    if not is_lack and not (isinstance(error, RuntimeError) and str(error) == _NO_THREAD):
        return None
    reason = error.strerror if isinstance(error, OSError) else error
    return Overloaded(f"this server has no room now: {reason}; try again later")


def check_lacks(error: BaseException) -> None:
    """For who takes an error of a file for there being none: raises what `machine_lacks` says of it."""
    if (lack := machine_lacks(error)) is not None:
        raise lack from None


class Unauthenticated(SlipstreamError):
    """The caller did not say who it is, or could not prove it."""

    status = "UNAUTHENTICATED"
    exit_code = 2


class PermissionDenied(SlipstreamError):
    """Who calls is known, and may not."""

    status = "PERMISSION_DENIED"
    exit_code = 2


class DeadlineExceeded(SlipstreamError):
    """The call took longer than this server serves one."""

    status = "DEADLINE_EXCEEDED"
    exit_code = 4


class ResumeMismatch(SlipstreamError):
    """A caption that was to go on after tokens already delivered would not begin with them now."""

    status = "ABORTED"
    exit_code = 4


class ServiceUnavailable(SlipstreamError):
    """A peer that this request cannot do without is not to be had now."""

    status = "UNAVAILABLE"
    exit_code = 4


class ObjectUnavailable(ServiceUnavailable):
    """The store of an object cannot be reached, fails, or is too slow; it may never come back."""


class ReaderUnavailable(ServiceUnavailable):
    """No reader of documents is to be had now; neither the document nor a model is at fault."""


class ServiceStopping(ServiceUnavailable):
    """The service is about to end and begins nothing new; another, or the next, will."""

    retry_after_s = 1.0


class DeviceLost(ServiceUnavailable):
    """The device failed in a way that only another process can use it again."""


class ServiceUnreachable(ServiceUnavailable):
    """The peer gave no answer at all."""


class FaultKind(StrEnum):
    """How a draft broke the protocol, for those who count."""

    ORDER = "order"
    """A message that nobody could be waiting for: of no line, out of its place, past its limit, or `ready` again."""
    CONTENT = "content"
    """Token ids, trees, proposals, times or other figures that cannot be."""
    SIZE = "size"
    """A message larger than any that is needed."""
    ENDED = "ended"
    """The stream was ended though the caption goes on."""
    SILENT = "silent"
    """It owed tokens and sent none. A busy machine does the same, so it is counted, and not held against the draft."""


class DraftFault(SlipstreamError):
    """The draft broke the protocol. It is dropped from the caption; the caption goes on."""

    status = "INTERNAL"

    def __init__(self, message: str, kind: FaultKind = FaultKind.CONTENT) -> None:
        super().__init__(message)
        self.kind = kind


class ReaderFault(SlipstreamError):
    """The reader of a document broke the protocol, or fell silent. Its drafts are done without."""

    status = "INTERNAL"
    exit_code = 4


class ProtocolViolation(SlipstreamError):
    """A peer sent a message that the protocol does not allow at this point."""

    status = "INVALID_ARGUMENT"
