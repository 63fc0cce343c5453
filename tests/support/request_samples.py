"""Valid calls of every method of all three services, small ones, to be damaged."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import Message
from hypothesis import strategies as st

from slipstream.rpc.v1 import archive_pb2, common_pb2, draft_pb2, gateway_pb2, target_pb2

T = TypeVar("T")
CAPABILITY = b"sixteen or more."
FRAMES, WIDTH, HEIGHT = 2, 32, 24
PACKAGE = "slipstream.rpc.v1"
FILES: dict[str, Any] = {"Gateway": gateway_pb2, "Archive": archive_pb2, "Target": target_pb2, "Draft": draft_pb2}
SERVICES = {"Gateway": "gateway", "Archive": "gateway", "Target": "target", "Draft": "draft"}


@dataclass(frozen=True)
class Sample:
    """One call as it should be: its method, and the messages of the request."""

    service: str
    method: str
    messages: tuple[Message, ...]

    @property
    def path(self) -> str:
        return f"/{PACKAGE}.{self.service}/{self.method}"


def methods() -> list[tuple[str, str]]:
    """Every method of every service, by the descriptors: none can be forgotten."""
    return [
        (service, method.name)
        for service, file in FILES.items()
        for method in file.DESCRIPTOR.services_by_name[service].methods
    ]


class Samples:
    """Makes valid calls about one clip, which lies at `path` for the gateway."""

    def __init__(self, draw: st.DrawFn, clip: bytes, path: str, target_address: str) -> None:
        self._draw = draw
        self._clip = clip
        self._path = path
        self._target_address = target_address
        self._number = draw(st.integers(0, 10**6))

    def make(self, service: str, method: str) -> Sample:
        """A call of this method."""
        self._number += 1
        makers = {
            "Caption": self._caption,
            "CaptionSegments": lambda: self._caption(self._one_of(("fixed:0.5s", "shots"))),
            "ReadDocument": self._document,
            "SubmitBatch": self._submit,
            "Session": self._target_session if service == "Target" else self._draft_session,
            "PullGuidance": lambda: (
                target_pb2.PullGuidanceRequest(
                    session_id=f"s{self._number - 1}", kind=target_pb2.GUIDANCE_KIND_SCORES, capability=CAPABILITY
                ),
            ),
            "AddHints": lambda: (
                target_pb2.AddHintsRequest(
                    session_id=f"s{self._number - 1}", texts=["A red circle.", ""], capability=CAPABILITY
                ),
            ),
        }
        if method in makers:
            return Sample(service, method, tuple(makers[method]()))
        kind = FILES[service].DESCRIPTOR.services_by_name[service].methods_by_name[method].input_type
        request = next(getattr(file, kind.name)() for file in (*FILES.values(), common_pb2) if hasattr(file, kind.name))
        if "batch" in kind.fields_by_name:
            request.batch = f"key-{self._one_of(range(4))}"
        return Sample(service, method, (request,))

    def _one_of(self, choices: Sequence[T]) -> T:
        return self._draw(st.sampled_from(choices))

    def _options(self) -> gateway_pb2.CaptionOptions:
        method = self._one_of(("slipstream", "autoregressive", "hints", "hsd"))
        return gateway_pb2.CaptionOptions(
            prompt="What happens?",
            num_frames=2,
            max_new_tokens=4,
            method=method,
            prediction=["A red circle.", "A blue one."] if method in ("hints", "hsd") else [],
            alpha=0.5,
            temperature=self._one_of((0.0, 0.7)),
            top_k=5,
            top_p=0.9,
            min_p=0.05,
            repetition_penalty=1.1,
            presence_penalty=0.2,
            frequency_penalty=0.1,
            seed=7,
            stop=["."],
            choice=self._one_of(([], ["a star", "a square"])),
        )

    def _caption(self, segments: str = "") -> list[Message]:
        options = self._options()
        if segments:
            options.segments = segments
        if self._one_of((True, False)):
            options.path = self._path
            return [gateway_pb2.CaptionRequest(options=options)]
        third = len(self._clip) // 3 + 1
        chunks = [self._clip[start : start + third] for start in range(0, len(self._clip), third)]
        video: list[Message] = [gateway_pb2.CaptionRequest(video=chunk) for chunk in chunks]
        return [gateway_pb2.CaptionRequest(options=options), *video]

    def _document(self) -> list[Message]:
        options = gateway_pb2.DocumentOptions(pages="1", dpi=72, surface="markdown", caption=self._options())
        options.caption.num_frames = 1
        parts = (b"%PDF-1.6\n", b"%%EOF")
        chunks: list[Message] = [gateway_pb2.ReadDocumentRequest(document=part) for part in parts]
        return [gateway_pb2.ReadDocumentRequest(options=options), *chunks]

    def _submit(self) -> list[Message]:
        batch = archive_pb2.BatchOptions(key=f"key-{self._one_of(range(4))}", metadata={"who": "fuzz"})
        batch.caption.CopyFrom(gateway_pb2.CaptionOptions(num_frames=2, max_new_tokens=4))
        items = [archive_pb2.BatchItem(custom_id=f"i{number}", source=self._path) for number in range(3)]
        return [
            archive_pb2.SubmitBatchRequest(batch=batch),
            *(archive_pb2.SubmitBatchRequest(item=item) for item in items),
        ]

    def _header(self) -> common_pb2.FramesHeader:
        return common_pb2.FramesHeader(num_frames=FRAMES, width=WIDTH, height=HEIGHT, seconds_per_frame=0.5)

    def _pixels(self) -> bytes:
        return bytes(number * 37 % 251 for number in range(FRAMES * WIDTH * HEIGHT * 3))

    def _target_session(self) -> list[Message]:
        start = target_pb2.TargetStart(
            session_id=f"s{self._number}",
            prompt="What happens?",
            frames=self._header(),
            max_new_tokens=6,
            with_guidance=True,
            guidance_capability=CAPABILITY,
            sampling=common_pb2.Sampling(temperature=self._one_of((0.0, 0.8)), top_k=4, seed=3),
        )
        judge = target_pb2.Judge(window=[5, 6, 7], num_passes=1)
        if self._one_of((True, False)):
            start.self_draft.drafter = self._one_of(("hints", "hsd", "hints_draft", "prompt_lookup"))
            start.hints.CopyFrom(target_pb2.Hints(texts=["A red circle."], max_rows=9))
            window = [5, 6] if start.self_draft.drafter == "hints_draft" else []
            judge = target_pb2.Judge(window=window, num_passes=2, self_draft=4)
        return [
            target_pb2.TargetRequest(start=start),
            target_pb2.TargetRequest(frames=common_pb2.FrameChunk(data=self._pixels())),
            target_pb2.TargetRequest(judge=judge),
            target_pb2.TargetRequest(judge=judge),
            target_pb2.TargetRequest(end=common_pb2.End()),
        ]

    def _draft_session(self) -> list[Message]:
        start = draft_pb2.DraftStart(
            session_id=f"s{self._number}",
            prompt="What happens?",
            frames=self._header(),
            pruner=self._one_of(("uniform", "none", "random", "uv")),
            alpha=0.5,
            positions="original",
            guidance=target_pb2.GUIDANCE_KIND_SCORES,
            guidance_address=self._target_address,
            guidance_capability=CAPABILITY,
            committed=[5],
            write_until=8,
            first_chunk=2,
            epoch=1,
            sampling=common_pb2.Sampling(temperature=self._one_of((0.0, 0.8)), top_k=4, seed=3),
        )
        restart = draft_pb2.Restart(epoch=2, keep=1, suffix=[6], write_until=8, first_chunk=1)
        return [
            draft_pb2.DraftRequest(start=start),
            draft_pb2.DraftRequest(frames=common_pb2.FrameChunk(data=self._pixels())),
            draft_pb2.DraftRequest(restart=restart),
            draft_pb2.DraftRequest(advance=draft_pb2.Advance(epoch=2, write_until=12)),
            draft_pb2.DraftRequest(end=common_pb2.End()),
        ]
