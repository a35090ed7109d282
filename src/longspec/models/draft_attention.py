"""The projections of a draft layer's attention. Shapes: B rows, S tokens, N query heads, K key/value heads, D head width."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from longspec.models.rotation import rotate
from longspec.models.target import head_width


class DraftAttention(nn.Module):
    """Projections from inputs of width E, and back to the target's hidden width H.

    biases: of queries, keys and values; keys_values: whether it has any of its own.
    """

    def __init__(self, config: Any, inputs: int, *, biases: bool, keys_values: bool = True) -> None:
        super().__init__()
        self.head_width = head_width(config)
        query_width, key_width = config.num_attention_heads * self.head_width, config.num_key_value_heads * self.head_width
        # Each draws random numbers when it is made: another order would give other fresh drafts.
        self.q_proj = nn.Linear(inputs, query_width, bias=biases)
        if keys_values:
            self.k_proj = nn.Linear(inputs, key_width, bias=biases)
            self.v_proj = nn.Linear(inputs, key_width, bias=biases)
        self.o_proj = nn.Linear(query_width, config.hidden_size, bias=False)

    def _heads(self, x_BSE: Tensor) -> Tensor:
        return x_BSE.unflatten(-1, (-1, self.head_width)).transpose(1, 2)

    def keys_values(self, x_BSE: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys (rotated) and values [B, K, S, D]."""
        return rotate(self._heads(self.k_proj(x_BSE)), rope), self._heads(self.v_proj(x_BSE))

    def forward(self, x_BSE: Tensor, rope: tuple[Tensor, Tensor], attend: Callable[[Tensor], Tensor]) -> Tensor:
        """Attend by rotated queries and project back, [B, S, H]; attend: queries -> output, [B, N, S, D] both."""
        seen_BNSD = attend(rotate(self._heads(self.q_proj(x_BSE)), rope))
        return self.o_proj(seen_BNSD.transpose(1, 2).flatten(2))
