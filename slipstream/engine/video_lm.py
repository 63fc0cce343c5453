"""What every Video-LLM looks like to the services: `VideoLM`."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.device_copy import to_device
from slipstream.engine import segments
from slipstream.engine.forward import Begun, DecodeState, Note, Prefill, PromptRows, Runner
from slipstream.engine.kv_cache import KVCache
from slipstream.engine.row_prefill import Ride, RowPrefill
from slipstream.engine.segments import Additions, GreedyRows, Observer, PassRows, Rows, Window, end_of, kept_rows
from slipstream.engine.static.steps import StaticSteps
from slipstream.engine.thread import finish_work
from slipstream.errors import InvalidRequest, LimitExceeded
from slipstream.families.adapter import Adapter, FrameFacts, Pixels, PromptPlan, TextDecoder, TextStream, VideoGrid
from slipstream.families.preprocess import frames_at_once
from slipstream.families.prompts import ChatTemplate
from slipstream.sampling.sampler import largest_of
from slipstream.service_info import ModelInfo
from slipstream.session_messages import Chat
from slipstream.speculation.methods import Positions, check_positions
from slipstream.speculation.protocol import TokenTree

__all__ = ["Adapter", "DecodeState", "Prefill", "PromptPlan", "VideoGrid", "VideoLM"]

MAX_SECONDS_PER_FRAME = 86_400
MAX_VIDEO_S = 100 * 86_400
"""No film is longer, and its times are short words."""


class VideoLM:
    """A loaded Video-LLM. Not thread-safe: all tensor work belongs on the one thread that owns the model."""

    def __init__(
        self,
        info: ModelInfo,
        adapter: Adapter,
        runner: Runner,
        text: TextDecoder,
        text_template: ChatTemplate | None = None,
        *,
        strict_width: int = 0,
    ) -> None:
        self.info = info
        self.strict_width = strict_width
        """Above 0, every step runs alone and at exactly this width, see `step`."""
        self.on_pass: Callable[[int, float], None] = lambda num_states, seconds: None
        """Called after every `step`, on the thread that runs it."""
        self.static: StaticSteps | None = None
        """Steps of fixed shapes, see `open_static_steps`; None: every pass has the shape that it needs."""
        self.make_static_steps: Callable[..., StaticSteps] = StaticSteps
        self.runner = runner
        self._adapter = adapter
        self.text = text
        self._text_template = text_template  # None: the checkpoint has no chat without a video

    def plan_prompt(
        self,
        prompt: Chat | str,
        num_frames: int,
        *,
        frame_size: tuple[int, int] | None = None,
        seconds_per_frame: float | None = None,
        times_s: Sequence[float] = (),
    ) -> PromptPlan:
        """Tokenise a prompt about `num_frames` frames. Needs no model pass.

        Args:
            prompt: the user's words, alone or at the end of a chat.
            num_frames: frames that `encode_frames` will get.
            frame_size: their height and width, which some families need to count tokens; None means the usual size.
            seconds_per_frame: from one frame to the next, which some families put into positions; None: not known.
            times_s: when each frame is shown, from the video's start, which some families tell; none: not known.

        Raises:
            InvalidRequest: an empty prompt, no frames, a pace that no video has, or frames that the model cannot take.
            LimitExceeded: prompt and video leave no room in the context for an answer.
        """
        chat = _checked(prompt)
        if num_frames < 1:
            raise InvalidRequest(f"a video needs at least one frame, got {num_frames}")
        if seconds_per_frame is not None and not 0 <= seconds_per_frame <= MAX_SECONDS_PER_FRAME:
            raise InvalidRequest(
                f"seconds_per_frame must be 0 to {MAX_SECONDS_PER_FRAME} (a day), got {seconds_per_frame}"
            )
        if times_s and (len(times_s) != num_frames or not all(0 <= time_s < MAX_VIDEO_S for time_s in times_s)):
            raise InvalidRequest(f"{num_frames} frames need as many times within {MAX_VIDEO_S} s, or none")
        plan = self._adapter.plan_prompt(chat, FrameFacts(num_frames, frame_size, seconds_per_frame, times_s))
        if plan.num_tokens >= self.info.max_context:
            most = f" (at most {self.info.max_frames})" if num_frames > self.info.max_frames else ""
            raise LimitExceeded(
                f"{num_frames} frames and the prompt take {plan.num_tokens} tokens, but the context of"
                f" {self.info.model_id} has {self.info.max_context}; send fewer frames{most} or a shorter prompt"
            )
        positions, _ = self._adapter.positions(plan, torch.arange(plan.num_tokens), Positions.ORIGINAL)
        if int(positions.max()) >= self.info.max_context:
            raise LimitExceeded(
                f"the video's time reaches position {int(positions.max())}, but {self.info.model_id} was made for"
                f" {self.info.max_context}: the video is too long; caption a part of it"
            )
        return plan

    def plan_text(self, prompt: Chat | str) -> PromptPlan:
        """Tokenise a prompt about no video: the same chat without one. Needs no model pass. For `start_text`.

        Raises:
            InvalidRequest: an empty prompt, or a checkpoint that has no chat without a video.
            LimitExceeded: it leaves no room in the context for an answer.
        """
        chat = _checked(prompt)
        if self._text_template is None:
            raise InvalidRequest(f"the chat template of {self.info.model_id} takes no text without a video")
        token_ids = tuple(self._text_template.encode(chat))
        if len(token_ids) >= (context := self.info.max_context):
            raise LimitExceeded(f"prompt takes {len(token_ids)} tokens of {context} of context; send a shorter one")
        return PromptPlan(token_ids, video=(), text_start=0, num_steps=0)

    def encode_frames(self, frames: NDArray[np.uint8]) -> Tensor:
        """Run the vision tower.

        Args:
            frames: RGB, uint8 [n, height, width, 3].

        Returns:
            [tokens, features], as many as `plan_prompt` counts for frames of this number and size. The first `hidden`
            features are the embeddings; further ones, of some families, are added behind the first layers.
            Raises `InvalidRequest` for frames of another shape or type."""
        return self.encode(self.preprocess(frames, len(frames)))

    def preprocess(self, frames: NDArray[np.uint8], num_frames: int) -> list[Pixels]:
        """The half of `encode_frames` that needs no model, and may run on any thread: pixels in chunks.

        Args:
            num_frames: of the whole video, of which `frames` may be a part.
        """
        if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[-1] != 3 or 0 in frames.shape:
            raise InvalidRequest(f"frames must be uint8 [n, height, width, 3], got {frames.dtype} {list(frames.shape)}")
        size = frames_at_once(self.info.device, frames.shape[1:3])
        with torch.inference_mode():
            chunks = (frames[first : first + size] for first in range(0, len(frames), size))
            return [self._adapter.preprocess(chunk, num_frames) for chunk in chunks]

    def encode(self, chunks: Sequence[Pixels]) -> Tensor:
        """The other half: the vision tower."""
        with torch.inference_mode():
            embeddings = torch.cat([self._adapter.encode(pixels) for pixels in chunks])
        finish_work(embeddings.device)
        return embeddings

    def room(self, free_bytes: int) -> int:
        """How many of the bytes that are free here a pass may count on, at whatever else runs it."""
        return self.runner.room(free_bytes)

    def kv_bytes(self, num_tokens: int) -> int:
        """Bytes of the cache that `start_prefill` makes for `num_tokens` tokens, prompt and headroom together."""
        return self.runner.cache_bytes(num_tokens + self.strict_width)

    def prefill_bytes(self, kv_bytes: int) -> int:
        """Bytes that the longest prefill whose keys and values take no more than that needs beside them at its peak."""
        return self.runner.prefill_bytes(min(kv_bytes // self.runner.kv_bytes_per_token, self.info.max_context))

    def open_static_steps(self, num_bytes: int) -> None:
        """Has all caches lie in a pool of so many bytes from now on, and decoding take steps of fixed shapes, which a
        GPU replays as graphs. Raises `ModelNotUsable` when there is no room for the pool."""
        self.static = self.make_static_steps(self.runner, num_bytes, self._adapter.num_axes, width=self.strict_width)

    def start_prefill(
        self,
        plan: PromptPlan,
        video_embeddings: Tensor,
        *,
        keep: Tensor | None = None,
        positions: str = Positions.ORIGINAL,
        headroom: int = 512,
        observer: Observer | None = None,
    ) -> Prefill:
        """Begin the pass over a prompt; no layer has run when this returns.

        Args:
            plan: from `plan_prompt`.
            video_embeddings: from `encode_frames`, [num_video_tokens, features].
            keep: which video tokens to keep, int64, ascending; None keeps all.
            positions: one of `Positions`, see `Adapter.positions`.
            headroom: tokens that the answer may take before the cache is reallocated.
            observer: sees the prompt's attention in every layer, see `TextAttention`.
        """
        check_positions(positions)
        prompt = self._prompt(plan, video_embeddings, keep, positions, headroom)
        begun = self.runner.start([replace(prompt.rows, observer=observer)])
        if observer is not None:
            observer.place_video(prompt.video)
        return Prefill(begun, prompt.state, video=prompt.video, num_text_tokens=plan.num_text_tokens, observer=observer)

    def start_row_prefill(
        self, plan: PromptPlan, video_embeddings: Tensor, *, guidance_layer: int, headroom: int = 512
    ) -> RowPrefill:
        """`start_prefill` of a whole prompt that decoding passes may carry along; `guidance_layer` is L. For models in
        one process, without a strict width."""
        prompt = self._prompt(plan, video_embeddings, None, Positions.ORIGINAL, headroom)
        return RowPrefill(self.runner, prompt, guidance_layer)

    def _prompt(
        self, plan: PromptPlan, video_embeddings: Tensor, keep: Tensor | None, positions: str, headroom: int
    ) -> PromptRows:
        """See `start_prefill`; with a new cache."""
        if len(video_embeddings) != plan.num_video_tokens:
            raise InvalidRequest(
                f"the video has {len(video_embeddings)} tokens, but the prompt was planned for {plan.num_video_tokens};"
                " plan it with the frames' number and size"
            )
        with torch.inference_mode():
            rows, video = kept_rows(keep, plan.video_rows, plan.num_tokens)
            position_ids, next_position = self._adapter.positions(plan, rows, positions)
            embeddings, *features = video_embeddings.split(self.info.hidden_size, dim=1)
            hidden = self._adapter.embed_prompt(plan, embeddings)
            hidden = hidden.index_select(0, to_device(rows, hidden.device))
            additions = Additions(plan.video_rows, tuple(features)).among(rows) if features else None
        cache = self.runner.new_cache(len(rows) + headroom + self.strict_width, plan.num_text_tokens)
        state = DecodeState(cache, num_prompt_tokens=len(rows), position_offset=next_position - len(rows))
        prompt = Rows(cache, hidden, to_device(position_ids, hidden.device), additions=additions)
        return PromptRows(prompt, state, video, plan.num_text_tokens)

    def resume_prefill(self, plan: PromptPlan, cache: KVCache, *, observer: Observer | None = None) -> Prefill:
        """Begin the pass over a prompt's text alone; `cache` holds all that comes before it, none of it pruned.

        The positions of those rows do not depend on the text, so a cache of another prompt about the same video will
        do when the token ids before the text are equal.
        """
        assert cache.length == plan.text_start, "the cache ends where the text begins"
        positions, next_position = self._all_positions(plan)
        hidden = self.runner.embed(plan.token_ids[plan.text_start :])
        rows = Rows(cache, hidden, to_device(positions[..., plan.text_start :], hidden.device), observer=observer)
        forward = self.runner.start([rows])
        state = DecodeState(cache, num_prompt_tokens=plan.num_tokens, position_offset=next_position - plan.num_tokens)
        if observer is not None:
            observer.place_video(plan.video_rows)
        no_video = torch.empty(0, dtype=torch.int64)
        return Prefill(forward, state, video=no_video, num_text_tokens=plan.num_text_tokens)

    def start_text(self, plan: PromptPlan, *, headroom: int = 512, observer: Observer | None = None) -> Prefill:
        """Begin the pass over a prompt from `plan_text`, see `start_prefill`."""
        cache = self.runner.new_cache(plan.num_tokens + headroom + self.strict_width)
        return self.resume_prefill(plan, cache, observer=observer)

    def step(self, batch: Sequence[tuple[DecodeState, Window]], ride: Ride | None = None) -> list[Tensor]:
        """Feed every state's new tokens in one packed pass and append them to its cache.

        The rows of a tree are in its nodes' order, and see the nodes above them; `DecodeState.keep_path` then makes a
        chain of one of its paths. Until that, or a rollback, the state only takes in more nodes of the same tree.

        With a `strict_width` every state has a pass of its own, filled up to that width with rows that are forgotten
        again: a token's row is then computed by the same kernels on the same shapes, whether it stands in a window or
        alone.

        Args:
            ride: rows of a prompt that the pass carries along; it is then an ordinary one, whatever else is set.

        Returns:
            Per state the fp32 logits that follow each of its new tokens, [n, vocab].

        Raises:
            LimitExceeded: a state would leave the model's context; no state has changed then.
            InvalidRequest: a tree where there is a strict width.
        """
        with self._told_of(batch):
            found = self._run_step(batch) if ride is None else self._run_ride(batch, ride)
            finish_work(found[0].logits.device)
        return [rows.logits for rows in found]

    def step_and_choose(
        self, batch: Sequence[tuple[DecodeState, Window]], ride: Ride | None = None
    ) -> list[GreedyRows]:
        """`step`, and which token has the largest of each row's logits: those of all states come to the host in one
        copy, which is all that is waited for."""
        with self._told_of(batch):
            found = self._run_step(batch) if ride is None else self._run_ride(batch, ride)
            with torch.inference_mode():
                largest = [rows.largest if rows.largest is not None else largest_of(rows.logits) for rows in found]
                chosen = iter((torch.cat(largest) if len(largest) > 1 else largest[0]).tolist())
        return [GreedyRows(rows.logits, [*islice(chosen, len(rows.logits))]) for rows in found]

    @contextmanager
    def _told_of(self, batch: Sequence[tuple[DecodeState, Window]]) -> Iterator[None]:
        """Around a step, up to its wait: `on_pass` hears of it. Raises as `step` does; where something fails behind
        its rows, as for want of memory, they are taken back: who asked may ask again."""
        assert len({id(state) for state, _ in batch}) == len(batch), "a state can step once per pass"
        if any(end_of(state.next_position, window) > self.info.max_context for state, window in batch):
            raise LimitExceeded(f"the answer has reached the end of the context of {self.info.max_context} tokens")
        started, before = time.perf_counter(), [state.num_tokens for state, _ in batch]
        try:
            yield
        except Exception:
            for (state, _), num_tokens in zip(batch, before, strict=True):
                state.rollback(min(num_tokens, state.num_tokens))
            raise
        self.on_pass(len(batch), time.perf_counter() - started)

    def _run_step(self, batch: Sequence[tuple[DecodeState, Window]]) -> list[PassRows]:
        """What `step` does once its windows are known to fit, up to the wait."""
        if self.strict_width:
            return [self._strict_step(state, token_ids) for state, token_ids in segments.chains_of(batch)]
        if self.static is not None and (found := self.static.run(batch)) is not None:
            return found
        return [PassRows(rows) for rows in self.runner.run([self._step_rows(state, window) for state, window in batch])]

    def _run_ride(self, batch: Sequence[tuple[DecodeState, Window]], ride: Ride) -> list[PassRows]:
        """`_run_step` with rows that ride along."""
        return [PassRows(rows) for rows in ride.run([self._step_rows(state, window) for state, window in batch])]

    def _strict_step(self, state: DecodeState, token_ids: Sequence[int]) -> PassRows:
        num_tokens, num_fill = state.num_tokens, self.strict_width - len(token_ids)
        assert num_fill >= 0, "a window must fit the strict width"
        if self.static is not None and (found := self.static.run([(state, token_ids)])) is not None:
            return found[0]
        filled = [*token_ids, *[token_ids[-1]] * num_fill]
        (logits,) = self.runner.run([self._step_rows(state, filled)])
        state.rollback(num_tokens + len(token_ids))
        return PassRows(logits[: len(token_ids)])

    def write_ahead(self, batch: Begun, num_tokens: int, note: Note | None = None) -> list[list[int]] | None:
        """For every state its greedy tokens behind one more token, without a wait between them: at most `num_tokens`,
        all but the last in the cache then, too. None, and nothing has happened, where `step` again and again takes no
        longer. A token below 0: not finite logits. It rounds as it likes, tells `note` all, raises as `step`."""
        if any(state.next_position + num_tokens > self.info.max_context for state, _ in batch):
            raise LimitExceeded(f"the answer has reached the end of the context of {self.info.max_context} tokens")
        started = time.perf_counter()
        write = self._write_alone if self.static is None else self.static.write_ahead
        if (written := write(batch, num_tokens, note)) is not None:
            self.on_pass(len(batch), time.perf_counter() - started)
        return written

    @property
    def most_nodes(self) -> int:
        """See `Runner.most_nodes`."""
        return self.runner.most_nodes

    def read_nodes(self, state: DecodeState, tree: TokenTree) -> Tensor | None:
        """What `step` gives for a tree's new nodes, [nodes, vocab], rounded otherwise; None: a pass takes no longer."""
        if len(tree.new_token_ids) > self.most_nodes:
            return None
        with self._told_of([(state, tree)]):
            return self.runner.read_nodes(state.cache, tree, state.next_position - tree.num_cached)

    def _write_alone(self, batch: Begun, num_tokens: int, note: Note | None) -> list[list[int]] | None:
        """Without static steps: of one session alone, as several share the reading of weights in a pass."""
        if len(batch) > 1 or self.strict_width:
            return None
        ((state, token),) = batch
        written = self.runner.write_ahead(state.cache, token, state.next_position, num_tokens, note)
        return None if written is None else [written]

    def text_stream(self) -> TextStream:
        """A fresh incremental detokeniser."""
        return TextStream(self.text)

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text as the model would write it in its answer; nothing in it acts as a special token. On any
        thread."""
        return self.text.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids` without special tokens."""
        return self.text.decode(token_ids)

    def _step_rows(self, state: DecodeState, window: Window) -> Rows:
        if isinstance(window, TokenTree):
            return self._tree_rows(state, window)
        hidden = self.runner.embed(window)
        positions = state.next_position + torch.arange(len(window), device=hidden.device)
        return Rows(state.cache, hidden, self._on_all_axes(positions))

    def _tree_rows(self, state: DecodeState, tree: TokenTree) -> Rows:
        assert tree.num_cached <= state.num_tokens - state.num_prompt_tokens, "a tree's first nodes are in the cache"
        hidden = self.runner.embed(tree.new_token_ids)
        depths = to_device(torch.tensor(tree.depths[tree.num_cached :]), hidden.device)
        return Rows(state.cache, hidden, self._on_all_axes(state.next_position - tree.num_cached + depths), tree=tree)

    def _all_positions(self, plan: PromptPlan) -> tuple[Tensor, int]:
        """Of all tokens of a prompt, and of the one behind it; without a video they are simply counted."""
        rows = torch.arange(plan.num_tokens)
        if plan.is_text:
            return self._on_all_axes(rows), plan.num_tokens
        return self._adapter.positions(plan, rows, Positions.ORIGINAL)

    def _on_all_axes(self, positions: Tensor) -> Tensor:
        return positions if self._adapter.num_axes == 1 else positions.expand(self._adapter.num_axes, -1)


def _checked(prompt: Chat | str) -> Chat:
    if not (chat := Chat(prompt) if isinstance(prompt, str) else prompt).question.strip():
        raise InvalidRequest("prompt is empty; ask for a description, for instance")
    return chat
