"""What the pocket reader must be able to say inside while it learns to read; thrown away when it can.

Without them a decoder this small takes long to find out that text goes from left to right.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from training.reader import BINS, CHARACTERS, COLUMNS, IGNORED, ROWS

MOST_LINES = 32


class Heads(nn.Module):
    """What the vision tower and inner layers must be able to say, which is needed in training only."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.strips = nn.Linear(hidden_size, BINS * (len(CHARACTERS) + 1))
        self.starts = nn.Linear(hidden_size, BINS)
        self.lines = nn.Linear(hidden_size, 2 + MOST_LINES)
        self.places = nn.Linear(hidden_size, ROWS + COLUMNS)

    def strips_loss(self, cells: Tensor, strips: Tensor, starts: Tensor) -> tuple[Tensor, float]:
        """Loss over cells [n, cells, hidden], and the share of strips with a character that are named rightly."""
        guesses = self.strips(cells).unflatten(-1, (BINS, -1))
        loss = functional.cross_entropy(guesses.flatten(0, 2), strips.flatten())
        loss = loss + functional.binary_cross_entropy_with_logits(self.starts(cells), starts)
        drawn = strips < len(CHARACTERS)
        return loss, (guesses.argmax(-1) == strips)[drawn].float().mean().item()

    def lines_loss(self, cells: Tensor, lines: Tensor) -> Tensor:
        columns, numbers = self.lines(cells).flatten(0, 1).split((2, MOST_LINES), -1)
        return naming_loss(columns, lines[..., 0]) + naming_loss(numbers, lines[..., 1])

    def places_loss(self, texts: Tensor, places: Tensor) -> tuple[Tensor, float]:
        """Loss over states [n, text, hidden] before each token, and the share of rightly placed tokens."""
        rows, columns = self.places(texts).split((ROWS, COLUMNS), -1)
        loss = naming_loss(rows.flatten(0, 1), places[..., 0]) + naming_loss(columns.flatten(0, 1), places[..., 1])
        right = (rows.argmax(-1) == places[..., 0]) & (columns.argmax(-1) == places[..., 1])
        return loss, right[places[..., 0] >= 0].float().mean().item()


def naming_loss(guesses: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(guesses.float(), labels.flatten(), ignore_index=IGNORED)


def kept_cells(written: Tensor, blank_share: float) -> Tensor:
    """Cells [n, k] in order: all with text of `written` [n, cells], and blank ones, at least that share of all.

    Blank cells teach little and cost as much as others, so most of the training leaves many of them out, as pruning
    does, and only its end shows whole pages.
    """
    most = int(written.sum(1).max())
    count = most + round(blank_share * (written.shape[1] - most))
    return (written * 2.0 + torch.rand(written.shape)).topk(count).indices.sort().values
