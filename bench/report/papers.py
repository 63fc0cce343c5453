"""The papers' own figures, as they print them, for a place beside ours. Data alone.

Paper 000 is ParallelVLM (Kong et al.), on 8 L40S GPUs with 128 frames, 25,088 video tokens and 512 tokens of text;
paper 001 is SpecVLM (Ji et al.). Their checkpoints and videos are not those measured here: orders and shapes can be
compared, figures cannot.
"""

from collections.abc import Mapping
from dataclasses import dataclass

HARDWARE = "8x L40S, 25,088 video tokens, 512 tokens of text"
PAIRS = {"small": "LLaVA-OV 0.5B/7B", "large": "LLaVA-OV 7B/72B", "self": "LLaVA-OV 7B/7B"}


@dataclass(frozen=True)
class Reported:
    """One method in a paper's table: mean accepted length and speedup over plain decoding."""

    M: float | None
    speedup: float


METHODS: Mapping[str, Mapping[str, Reported]] = {
    "sd": {
        "small": Reported(4.26, 1.06),
        "large": Reported(4.14, 2.01),
    },
    "onsd": {
        "small": Reported(3.73, 1.35),
        "large": Reported(3.67, 2.17),
        "self": Reported(3.60, 0.84),
    },
    "sd_tree": {
        "small": Reported(5.08, 1.26),
        "large": Reported(4.64, 2.26),
    },
    "specvlm": {
        "small": Reported(4.89, 1.81),
        "large": Reported(4.51, 2.74),
        "self": Reported(4.94, 1.22),
    },
    "std": {"self": Reported(8.04, 1.24)},
    "parallelvlm": {
        "small": Reported(8.47, 2.11),
        "large": Reported(6.82, 3.36),
    },
    "parallelvlm_same": {"self": Reported(14.8, 1.55)},
}
"""Paper 000, table 1: M on VideoDetailCaption, the speedup averaged over five benchmarks."""

LOSSY: Mapping[str, tuple[float, float]] = {
    "fastv": (0.846, 1.63),
    "sparsevlm": (0.871, 1.60),
    "pyramiddrop": (0.878, 1.58),
    "dycoke": (0.909, 1.47),
}
"""Paper 000, table 2, LLaVA-OV-72B with a tenth of the tokens kept: A, and speedup."""


@dataclass(frozen=True)
class AlphaPoint:
    """One share of pruned video tokens in paper 000."""

    alpha: float
    draft_pass_ms: float | None
    M: float | None
    speedup: float | None
    tau: float | None = None


ALPHA_TARGET_MS = 420.0
ALPHA = (
    AlphaPoint(0.0, 78.3, None, 2.94),
    AlphaPoint(0.5, 57.5, None, None),
    AlphaPoint(0.9, 46.6, 6.82, 3.43, 0.41),
    AlphaPoint(0.95, None, 6.53, 3.28, 0.37),
    AlphaPoint(0.99, None, 5.74, 2.90, 0.33),
    AlphaPoint(1.0, None, 4.53, 2.53, 0.27),
)
"""Paper 000, tables 3 and 7 and the text of figure 6, LLaVA-OV 7B/72B. The 2.94 of figure 6 is an average over
benchmarks, of which 3.36 is the value at 0.9; table 7's are of VideoDetailCaption."""

LATENCY_S: Mapping[str, Mapping[str, float]] = {
    "autoregressive": {"prefill": 44.23, "generate": 228.14, "total": 280.29},
    "sd": {"prefill": 44.23, "draft_prefill": 7.92, "draft_decode": 58.14, "generate": 54.85, "total": 165.15},
    "parallelvlm": {"prefill": 44.23, "generate": 67.85, "total": 112.08},
}
"""Paper 000, table 6, LLaVA-OV 7B/72B, seconds."""

ATTENTION_END_SHARE = 0.209
"""Paper 000, figure 4: of the tokens that attention keeps at alpha 0.9, those in frames 1 and 125 to 128."""
ATTENTION_END_WIDTH = 0.04
"""The share of all positions that these frames are (5 of 128)."""

SPECVLM_LOSS = -0.2
UNGUIDED_LOSS = (-0.3, -0.5)
"""Paper 000, section 5.3 on figure 7b: M at alpha 0.9 beside UV-Prune's, with SpecVLM's pruner and with those that ask
no target."""
