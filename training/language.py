"""The language model's training step: keeps some video tokens at their own positions, predicts the caption."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from training.augment import roughen
from training.examples import CaptionExample
from training.pocket import Family

IGNORED = -100


@dataclass(frozen=True)
class EncodedClip:
    """An example after the vision tower: `tokens` [shown tokens, hidden] and the place of each among all video tokens.

    `positions` [n] or [axes, n] are those of the whole prompt with all its video tokens; the answer starts at
    `answer_position`.
    """

    tokens: torch.Tensor
    places: torch.Tensor
    positions: torch.Tensor
    answer_position: int
    example: CaptionExample


@torch.no_grad()
def encode_clips(family: Family, model: Any, examples: list[CaptionExample], device: str) -> list[EncodedClip]:
    frames = torch.cat([example.frames for example in examples])
    with torch.autocast(device, dtype=torch.bfloat16):
        tokens = family.video_features(model, roughen(frames).to(device)).bfloat16()
    offsets = torch.arange(family.tokens_per_step)
    clips = []
    for example, clip_tokens in zip(examples, tokens.split([len(e.step_indices) for e in examples]), strict=True):
        places = (example.step_indices[:, None] * family.tokens_per_step + offsets).flatten()
        positions, answer_position = family.prompt_positions(
            model, example.prefix_ids, example.num_frames, example.prompt_ids, example.seconds_per_frame
        )
        clips.append(EncodedClip(clip_tokens.flatten(0, 1), places, positions, answer_position, example))
    return clips


@dataclass(frozen=True)
class CaptionBatch:
    """Padded rows: video tokens kept, the ids and positions of what stands around them, and the labels of the text."""

    video: torch.Tensor
    prefix_ids: torch.Tensor
    text_ids: torch.Tensor
    positions: torch.Tensor
    """[rows, n], or [axes, rows, n]."""
    labels: torch.Tensor


def make_batch(
    family: Family, clips: list[EncodedClip], kept_tokens: int, text_len: int, pad_id: int, device: str
) -> CaptionBatch:
    """Keeps `kept_tokens` random video tokens of each clip; the text is padded to `text_len`."""
    video, text_ids, positions, labels = [], [], [], []
    for clip in clips:
        example = clip.example
        kept = torch.randperm(len(clip.tokens))[:kept_tokens].sort().values
        video_start = len(example.prefix_ids)
        video_stop = video_start + example.num_frames // family.frames_per_step * family.tokens_per_step
        text = [*example.prompt_ids, *example.caption_ids]
        padding = text_len - len(text)
        video.append(clip.tokens[kept.to(clip.tokens.device)])
        text_ids.append(text + [pad_id] * padding)
        labels.append([IGNORED] * len(example.prompt_ids) + example.caption_ids + [IGNORED] * padding)
        num_prompt = clip.positions.shape[-1]
        rows = torch.cat(
            [torch.arange(video_start), video_start + clip.places[kept], torch.arange(video_stop, num_prompt)]
        )
        answer = clip.answer_position + torch.arange(text_len - len(example.prompt_ids))
        answer = answer.expand(*clip.positions.shape[:-1], -1)
        positions.append(torch.cat([clip.positions[..., rows], answer], dim=-1))
    return CaptionBatch(
        video=torch.stack(video).to(device),
        prefix_ids=torch.tensor([clip.example.prefix_ids for clip in clips], device=device),
        text_ids=torch.tensor(text_ids, device=device),
        positions=torch.stack(positions, dim=-2).to(device),
        labels=torch.tensor(labels, device=device),
    )


def caption_logits(family: Family, model: Any, batch: CaptionBatch, device: str) -> torch.Tensor:
    """Logits [rows, text_len - 1, vocab] of every text token but the first, given all before it."""
    embed = model.get_input_embeddings()
    closing = family.closing(model).expand(len(batch.video), -1, -1)
    embeds = torch.cat([embed(batch.prefix_ids), batch.video.float(), closing, embed(batch.text_ids)], dim=1)
    with torch.autocast(device, dtype=torch.bfloat16):
        # Without a mask, transformers takes gaps between positions for borders between packed sequences.
        hidden = model.model.language_model(
            inputs_embeds=embeds,
            position_ids=batch.positions,
            attention_mask=torch.ones(embeds.shape[:2], dtype=torch.long, device=device),
            use_cache=False,
        ).last_hidden_state
        text_hidden = hidden[:, -batch.text_ids.shape[1] : -1]
        logits: torch.Tensor = model.lm_head(text_hidden)
        return logits


def caption_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the caption's tokens; `labels` [rows, text_len] are aligned with the text itself."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=IGNORED)
