"""A batch of rendered clips, handed to a gateway's archive and followed. Knows no container."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc

from bench.clips import SHORT_SCENES, held_out_clips
from bench.compose_check.steps import CheckFailed, wait_until
from slipstream.rpc.v1 import archive_pb2 as pb
from slipstream.rpc.v1 import archive_pb2_grpc
from slipstream.rpc.v1.gateway_pb2 import CaptionOptions

MOUNT = "/videos"
CALL_TIMEOUT_S = 20
PAGE = 100
NUM_FRAMES, MAX_NEW_TOKENS = 32, 200


def render_videos(folder: Path, count: int) -> list[str]:
    """Clips of the synthetic world in `folder`, readable by anyone; returns their names."""
    folder.mkdir()
    folder.chmod(0o755)
    names = []
    for clip in held_out_clips(count, SHORT_SCENES):
        copy = folder / clip.name
        copy.write_bytes(clip.read_bytes())
        copy.chmod(0o644)
        names.append(clip.name)
    return names


class Batch:
    """One batch at the archive of the gateway at `address`."""

    def __init__(self, address: str, key: str, names: Sequence[str], max_new_tokens: int = MAX_NEW_TOKENS) -> None:
        self._key = key
        self._max_new_tokens = max_new_tokens
        self._names = names
        self._channel = grpc.insecure_channel(address)
        self._stub = archive_pb2_grpc.ArchiveStub(self._channel)

    def submit(self) -> pb.SubmitBatchResponse:
        """Hands it in, or finds it again."""
        answer: pb.SubmitBatchResponse = self._stub.SubmitBatch(
            self._messages(), timeout=CALL_TIMEOUT_S, wait_for_ready=True
        )
        return answer

    def counts(self) -> pb.JobCounts:
        """How many jobs are in which state. Raises `grpc.RpcError` while the archive cannot say."""
        answer: pb.Batch = self._stub.GetBatch(pb.GetBatchRequest(batch=self._key), timeout=CALL_TIMEOUT_S)
        return answer.counts

    def wait_done(self, num_done: int, timeout_s: float) -> pb.JobCounts:
        """Waits until so many jobs are done; an archive that cannot be asked for a while is asked again."""
        last = pb.JobCounts()

        def enough() -> bool:
            nonlocal last
            try:
                last = self.counts()
            except grpc.RpcError:
                return False
            lost = last.failed + last.dead + last.cancelled
            if lost:
                raise CheckFailed(f"{lost} jobs of the batch were lost: {self._reasons()}")
            return last.done >= num_done

        try:
            wait_until(f"{num_done} captions are done", enough, timeout_s, "docker compose logs gateway target")
        except CheckFailed as error:
            raise CheckFailed(f"{error}; last seen: {_shown(last)}") from None
        return last

    def jobs(self) -> list[pb.Job]:
        """All jobs with their results."""
        jobs, token = [], ""
        while True:
            request = pb.ListJobsRequest(batch=self._key, page_token=token, page_size=PAGE)
            page = self._stub.ListJobs(request, timeout=CALL_TIMEOUT_S)
            jobs += page.jobs
            token = page.next_page_token
            if not token:
                return jobs

    def close(self) -> None:
        """Closes the connection."""
        self._channel.close()

    def _messages(self) -> Iterator[pb.SubmitBatchRequest]:
        caption = CaptionOptions(num_frames=NUM_FRAMES, max_new_tokens=self._max_new_tokens)
        yield pb.SubmitBatchRequest(batch=pb.BatchOptions(key=self._key, caption=caption))
        for name in self._names:
            yield pb.SubmitBatchRequest(item=pb.BatchItem(custom_id=name, source=f"{MOUNT}/{name}"))

    def _reasons(self) -> str:
        lost = [job for job in self.jobs() if job.error]
        return "; ".join(f"{job.custom_id}: {job.error_code} {job.error}" for job in lost[:3])


def _shown(counts: pb.JobCounts) -> str:
    return ", ".join(f"{field.name} {value}" for field, value in counts.ListFields())
