"""Losses that come nearer to how often a drafted token is kept than the cross entropy of soft labels does.

With p the target's distribution and q the draft's, a token drawn from q is kept with probability a = sum_v min(p(v), q(v))
(Leviathan et al. 2023, section 3.2):

    tv    1 - a, the total variation
    lk    w KL(p || q) + (1 - w) (1 - a) with w = exp(-3 a), a constant to the gradient (arXiv 2602.23881)

The gradient of tv vanishes where the draft holds the target's tokens for impossible; lk begins with that of the divergence.

Shapes: N rows, O outcomes: all tokens; or the k likeliest ones, and all others together as the last.
"""

import torch
from torch import Tensor

from longspec.config.schema import LK, TV

FALL = 3.0  # how fast the divergence's weight falls with a


def acceptance_loss(kind: str, p_NO: Tensor, q_NO: Tensor, cross_entropy_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss [N] of this kind and its gradient [N, O] with respect to the logits of the outcomes.

    p_NO, q_NO: float, each row's sum 1; cross_entropy_N: -sum p log q of each row.
    """
    is_below_NO = q_NO < p_NO
    kept_N1 = torch.minimum(p_NO, q_NO).sum(-1, keepdim=True)
    # d(1 - a)/dq is -1 where q < p; through the softmax a token's part is q times (the mass of q there, less that -1).
    gradient_NO = ((q_NO * is_below_NO).sum(-1, keepdim=True) - is_below_NO.to(q_NO.dtype)).mul_(q_NO)
    if kind == TV:
        return 1 - kept_N1[:, 0], gradient_NO
    assert kind == LK, kind
    weight_N1 = torch.exp(-FALL * kept_N1)
    divergence_N = cross_entropy_N + torch.xlogy(p_NO, p_NO).sum(-1)
    loss_N = torch.lerp(1 - kept_N1[:, 0], divergence_N, weight_N1[:, 0])
    return loss_N, torch.lerp(gradient_NO, q_NO - p_NO, weight_N1)
