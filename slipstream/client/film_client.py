"""Films in segments for programs: one is sent to the gateway, and its segments come as they are captioned."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from slipstream.client.caption_client import RemotePath, Upload, Video
from slipstream.client.connection import Connection
from slipstream.client.document_client import DOCUMENT_TIMEOUT_S, answered_events
from slipstream.errors import InvalidRequest, ProtocolViolation
from slipstream.messages import Caption, CommittedText, CommittedToken, FilmEvent, Segment, SegmentCaption
from slipstream.options import CallOptions, CaptionOptions, keywords_of
from slipstream.rpc.codec import options_message
from slipstream.rpc.film_codec import call_caption_segments, film_chunk_message, film_request, read_film_events

FILM_TIMEOUT_S = DOCUMENT_TIMEOUT_S
LOST = "the gateway was lost behind {} captions of segments; its archive, if it has one, goes on where it was"


@dataclass(frozen=True)
class FilmCall(CallOptions):
    """What a caller says of one film: the options of each segment's caption, and how the film is cut."""

    request_id: str = field(default="", kw_only=True)
    timeout_s: float = field(default=FILM_TIMEOUT_S, kw_only=True)

    def film(self) -> CaptionOptions:
        """All that the gateway is asked. Raises `InvalidRequest` where nothing says how to cut."""
        options = self.asked()
        if not options.in_segments:
            raise InvalidRequest("say how the film is to be cut: segments='fixed:10s', or segments='shots'")
        return options


with_film_keywords = keywords_of(
    FilmCall,
    {
        "request_id": "names the film in every log and in the results; made by the gateway when empty.",
        "timeout_s": "seconds that the film may take in all.",
    },
)


async def film_events(
    connection: Connection, film: Video, options: CaptionOptions, *, request_id: str, timeout_s: float
) -> AsyncGenerator[FilmEvent, None]:
    """Asks for a film in segments and yields its events, see `FilmEvent`. Closing it ends the work.

    Raises what is wrong with the film, what the gateway says, and ServiceUnavailable when the gateway is not there, was
    lost, or took longer than `timeout_s`. The segments that came before are whole.
    """
    path = film.path if isinstance(film, RemotePath) else ""
    first = film_request(options_message(options, path=path, request_id=request_id))
    upload = Upload(film, first, film_chunk_message)
    await connection.settle()
    call = call_caption_segments(
        connection.channel, upload.messages(), timeout_s=timeout_s, metadata=connection.metadata
    )
    answered = answered_events(call, upload, read_film_events(call), Caption, LOST, timeout_s)
    async with aclosing(answered) as events:
        async for event in events:
            yield event


async def segment_captions(
    events: AsyncGenerator[FilmEvent, None], options: CaptionOptions
) -> AsyncGenerator[SegmentCaption, None]:
    """The segments of a film that was asked for with these options, each when the last of its events has come; then
    the summary. Closed, it closes the events.

    Raises `ProtocolViolation` for events out of order."""
    segment: Segment | None = None
    num_prompts = max(len(options.get("prompts", ())), 1)
    tokens: list[CommittedToken] = []
    captions: list[Caption] = []
    async with aclosing(events):
        async for event in events:
            match event:
                case Segment():
                    if segment is not None:
                        raise ProtocolViolation("the gateway ended a segment without its caption")
                    segment, tokens = event, []
                    if event.error:
                        yield SegmentCaption(event, None)
                        segment = None
                case CommittedText():
                    tokens += event.tokens
                case Caption():
                    if segment is None:
                        raise ProtocolViolation("the gateway captioned a segment that it has not named")
                    captions.append(replace(event, tokens=tuple(tokens)))
                    if segment.is_summary or len(captions) == num_prompts:
                        yield SegmentCaption(replace(segment, prompt=0), captions[0], tuple(captions[1:]))
                        captions = []
                    segment = None
