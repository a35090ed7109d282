"""Rotary positions (RoPE) as the target's own module computes them.

Shapes: B rows, N heads, S tokens, D head width.
"""

from torch import Tensor
from transformers.models.llama.modeling_llama import rotate_half


def rotate(x_BNSD: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary positions; `rope` is (cos, sin), each [B, S, D]."""
    cos_B1SD, sin_B1SD = rope[0][:, None], rope[1][:, None]
    return x_BNSD * cos_B1SD + rotate_half(x_BNSD) * sin_B1SD
