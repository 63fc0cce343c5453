"""The toy world of `toy_world` with drafts that write dynamic trees."""

import random
from collections.abc import Sequence

from slipstream.sampling.params import SamplingParams
from slipstream.sampling.sampler import DraftSampler, TargetSampler
from slipstream.speculation.methods import Shape
from slipstream.speculation.pipeline import Pipeline
from slipstream.speculation.protocol import StopRule
from slipstream.speculation.trees.confidence import Confident
from tests.sampling.toy_world import LENGTH, VOCAB, Text, ToyLM
from tests.speculation.dynamic_toys import DynamicStage, tree_costs

MAX_WINDOW = 6


class SampledTrees(DynamicStage):
    """A stage whose target and draft sample. The draft's pass is over some of its open nodes."""

    def __init__(self, models: tuple[ToyLM, ToyLM], params: SamplingParams, shape: Shape, order: random.Random) -> None:
        pipeline = Pipeline(Confident(), tree_costs(4.0, 0.6), max_window=MAX_WINDOW, vocab_size=VOCAB, shape=shape)
        super().__init__(pipeline, lambda output: 0, StopRule((), LENGTH))
        self.target, self.toy_draft = models
        self.target_sampler = TargetSampler(params, (), VOCAB)
        self.draft_sampler = DraftSampler(params, (), VOCAB)
        self.order = order
        self.next_token = self._own_choice
        self.num_branched = 0

    def _own_choice(self, output: Sequence[int]) -> int:
        return self.target_sampler.judge(self.target.logits(output), output, ())[1]

    def judge(self, round_s: float = 1.0, held_s: float = 0.0) -> None:
        self.num_branched += bool(self.passes[0][1])
        super().judge(round_s, held_s)

    def write_some(
        self, order: random.Random, open_nodes: Sequence[int], agreement: float, width: int, max_rows: int
    ) -> None:
        assert self.draft is not None
        written = []
        for node in order.sample(open_nodes, min(order.randint(1, max_rows), len(open_nodes))):
            text = [*self.draft.text, *self.draft.path(node)]
            tokens, chances = self.draft_sampler.candidates(self.toy_draft.logits(text)[0], text, width)
            written.append((node, tokens, chances))
        self.draft.write(written)

    def play(self, loss: float) -> "SampledTrees":
        """To the last token."""
        while self.finish_reason is None:
            if self.draft is None:
                self.join()
            elif self.order.random() < loss:
                self.lose()
            else:
                self.act(self.order, 0.0, 2 + self.order.randrange(2), 2)
        return self


def play_trees(models: tuple[ToyLM, ToyLM], rule: str, temperature: float, num_runs: int, shape: Shape) -> list[Text]:
    """Texts of target and draft with seeds from 0 on, among whose windows there are branches."""
    texts, num_branched = [], 0
    for seed in range(num_runs):
        params = SamplingParams(temperature, seed=seed, rule=rule)
        stage = SampledTrees(models, params, shape, random.Random(seed)).play(0.02 if seed % 2 else 0.0)
        texts.append(tuple(stage.output))
        num_branched += stage.num_branched
    assert num_branched > num_runs // 4, "few of the windows branch"
    return texts
