"""Drawing tokens from logits: greedy, or with a temperature, top-k and top-p.

Shapes: N rows, V vocabulary.
"""

from collections.abc import Collection

import torch
from torch import Tensor
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from longspec.models.target import Group, tensor_of_first_rank

NO_TOKEN = -1  # drawn where there is no distribution to draw from; the host raises an error when it would become text


class Sampler:
    """Draw the target's tokens. The warps are transformers' own, in its order: temperature, top-k, top-p.

    temperature 0 is greedy; top_k 0 and top_p 1 leave all tokens in; group: the ranks that hold the target together. The warps
    raise ValueError for values out of range.
    """

    def __init__(
        self,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        generator: torch.Generator | None = None,
        group: Group | None = None,
    ) -> None:
        self.temperature, self.generator, self.group = temperature, generator, group
        warps = [(TemperatureLogitsWarper, temperature, 1.0), (TopKLogitsWarper, top_k, 0), (TopPLogitsWarper, top_p, 1.0)]
        self.warps = [] if self.greedy else [kind(value) for kind, value, off in warps if value != off]

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def log_probabilities(self, logits_NV: Tensor) -> Tensor:
        """Return the logarithms of the warped distribution, in float32 or better; plain ones when greedy."""
        scores_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
        for warp in self.warps:
            scores_NV = warp(None, scores_NV)
        return scores_NV.log_softmax(-1)

    def draw(self, p_NV: Tensor) -> Tensor:
        """Draw one token of each distribution, which need not be normalised, int64 [N].

        Take the first of competing exponential clocks of rates p: unlike torch.multinomial this never waits for the device.
        """
        clock_NV = torch.empty_like(p_NV).exponential_(generator=self.generator)
        return (p_NV / clock_NV.clamp_min(torch.finfo(p_NV.dtype).tiny)).argmax(-1)

    def draw_own(self, p_NV: Tensor) -> Tensor:
        """Draw one token of each of the target's distributions, int64 [N]; NO_TOKEN where one holds inf or NaN."""
        return torch.where(p_NV.sum(-1).isfinite(), self.draw(p_NV), NO_TOKEN)

    def choose(self, logits_NV: Tensor) -> Tensor:
        """Return the target's next token of each row, int64 [N]; when sampling, NO_TOKEN where logits make no distribution."""
        return first_of_largest(logits_NV) if self.greedy else self.draw_own(self.log_probabilities(logits_NV).exp())

    def agreed(self, chosen: Tensor) -> Tensor:
        """Return what rank 0 chose: other ranks' logits may differ in their last bits, and then their draws altogether."""
        return tensor_of_first_rank(chosen, self.group)


def first_of_largest(x_NV: Tensor) -> Tensor:
    """Return argmax over the last dimension; on processors by blocks: their largest number is found sooner than its place."""
    block = next((size for size in (1024, 512, 256, 128) if x_NV.shape[-1] % size == 0), 0)
    if x_NV.device.type != "cpu" or not block:
        return x_NV.argmax(-1)
    x_NCL = x_NV.unflatten(-1, (-1, block))
    block_N1 = x_NCL.amax(-1).argmax(-1, keepdim=True)
    x_NL = x_NCL.gather(1, block_N1[..., None].expand(-1, -1, block))[:, 0]
    return block_N1[:, 0] * block + x_NL.argmax(-1)


def check_drawn(tokens: Collection[int]) -> None:
    """Raise RuntimeError, as torch.multinomial does, if a token of the text could not be drawn."""
    if NO_TOKEN in tokens:
        raise RuntimeError("the target's logits hold inf or NaN, so no token can be drawn; decode greedily to look at them")
