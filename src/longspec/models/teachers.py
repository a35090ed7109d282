"""The target's side of a loss: its k likeliest tokens, and the loss where these alone are known.

With p the target's distribution over V tokens, K its k likeliest, q the draft's, r(p) = 1 - sum_{v in K} p(v):

    loss     = - sum_{v in K} p(v) log q(v) - r(p) log r(q)
    gradient = q(v) - p(v)                    in K, with respect to the draft's logit of v
               q(v) - r(p) q(v) / r(q)        outside

The tokens outside K are one outcome. So the loss, less the entropy of p's k + 1 outcomes, is a Kullback-Leibler divergence:
never negative, 0 where q gives each of K, and all the others together, what p gives them, and never above that of all V tokens
(merging outcomes loses information). How q shares the rest among its tokens is not taught. With k = V it is the cross entropy
of the whole distribution.

Shapes: N tokens, C tokens of a chunk, H hidden width, T target's vocabulary, V the tokens that the distributions are over.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# Size of one chunk of float32 logits, of which about five are alive at once. benchmarks/loss_chunks.py sweeps it: on a CPU
# up to 4 MiB are as quick as all logits at once or quicker. A GPU's is reckoned so far: 450 tokens of a vocabulary of 152k,
# below which reading the head takes longer than multiplying by it.
CHUNK_BYTES = {"cpu": 4 * 2**20, "cuda": 256 * 2**20}
# Least tokens of a chunk on a CPU: with fewer, large vocabularies get up to 1.8 times slower.
LEAST_TOKENS = 128
# Of one of the k tokens: its number in int32, and its log-probability in float16, whose rounding moves a distribution 15 to 33
# times less than bfloat16's (nats of divergence, k = 64 and 256, benchmarks/top_k_labels.py): no such number leaves its range.
TOP_BYTES = 6


def chunk_tokens(vocabulary: int, device: torch.device) -> int:
    """Tokens whose logits are made at once."""
    return max(LEAST_TOKENS, CHUNK_BYTES[device.type] // (4 * vocabulary))


def draft_numbers(tokens: Tensor, ids_V: Tensor | None) -> Tensor:
    """The draft's numbers of the target's tokens, -1 where it cannot propose one; integers of any kind, which they stay.

    ids_V: the draft vocabulary, ascending; None: all tokens.
    """
    if ids_V is None:
        return tokens
    ids_V = ids_V.to(tokens.dtype)
    numbers = torch.searchsorted(ids_V, tokens, out_int32=tokens.dtype == torch.int32).clamp_(max=len(ids_V) - 1)
    return torch.where(ids_V[numbers] == tokens, numbers, -1)


@dataclass(frozen=True)
class SparseTeacher:
    """The target's side of a loss, without its hidden states and its head. Tokens are in the draft's own numbers.

    tokens_Nk: int32 or int64, each once; log_probs_Nk: any floating dtype, at the loss's temperature. best_N: the target's most
    likely token, -1: the draft cannot propose it, the row has no loss where the draft has a vocabulary of its own.
    next_log_prob_N: of the next tokens; None: the target's own loss is not wanted.
    """

    tokens_Nk: Tensor
    log_probs_Nk: Tensor
    best_N: Tensor
    next_log_prob_N: Tensor | None

    def __len__(self) -> int:
        """N."""
        return len(self.tokens_Nk)

    @property
    def target_vocabulary(self) -> int:
        """Logits that are made of each token on the target's side: none."""
        return 0

    @property
    def with_loss(self) -> bool:
        """Whether the target's own cross entropy is wanted."""
        return self.next_log_prob_N is not None

    def of(self, rows: slice | Tensor) -> "SparseTeacher":
        """Some of the tokens."""
        next_log_prob = None if self.next_log_prob_N is None else self.next_log_prob_N[rows]
        return SparseTeacher(self.tokens_Nk[rows], self.log_probs_Nk[rows], self.best_N[rows], next_log_prob)

    @property
    def own_loss_N(self) -> Tensor:
        """The target's own cross entropy with the next token; 0 where it is not wanted."""
        wanted = self.next_log_prob_N
        return torch.zeros_like(self.best_N, dtype=torch.float32) if wanted is None else -wanted.float()

    def loss_and_gradient_(self, logits_NV: Tensor) -> Tensor:
        """The loss [N] of the draft's logits, float32 or wider, which become its gradient with respect to them."""
        tokens_Nk = self.tokens_Nk.long()
        p_Nk, rest_N1 = self._distribution(logits_NV.dtype, tokens_Nk.shape[1] < logits_NV.shape[1])
        top_Nk = logits_NV.gather(-1, tokens_Nk)
        logits_NV.scatter_(-1, tokens_Nk, -torch.inf)
        # All in logarithms, so that a rest which the draft holds for impossible has a loss and a gradient. Where there are no
        # other tokens the least number stands for -inf, so that nothing becomes 0 times infinity.
        least = torch.finfo(logits_NV.dtype).min
        highest_N1 = logits_NV.amax(-1, keepdim=True).clamp_(min=least)
        # One exponential serves the sum and the gradient; the highest one is 1, so that the sum is 0 or at least 1.
        sum_N1 = logits_NV.sub_(highest_N1).exp_().sum(-1, keepdim=True)
        outside_N1 = (highest_N1 + sum_N1.log()).clamp_(min=least)
        normalizer_N1 = torch.logaddexp(outside_N1, top_Nk.logsumexp(-1, keepdim=True))
        loss_N = (normalizer_N1 - rest_N1 * outside_N1)[:, 0] - (p_Nk * top_Nk).sum(-1)
        logits_NV.mul_(((outside_N1 - normalizer_N1).exp_() - rest_N1) / sum_N1.clamp_(min=1))
        logits_NV.scatter_(-1, tokens_Nk, (top_Nk - normalizer_N1).exp_() - p_Nk)
        return loss_N

    def own_loss(self) -> Tensor:
        """Its sum."""
        return self.own_loss_N.sum()

    def soft_loss(self, logits_NV: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """The summed loss of logits / temperature, and its gradient with respect to these; `logits_NV` stays as it is."""
        gradient_NV = logits_NV / temperature
        return self.loss_and_gradient_(gradient_NV).sum(), gradient_NV

    def _distribution(self, dtype: torch.dtype, has_rest: bool) -> tuple[Tensor, Tensor]:
        """p of the k tokens and of the rest, which add up to 1: rounding in storage may have brought the k above it."""
        p_Nk = self.log_probs_Nk.to(dtype).exp()
        sum_N1 = p_Nk.sum(-1, keepdim=True)
        if not has_rest:
            return p_Nk / sum_N1, torch.zeros_like(sum_N1)
        return p_Nk / sum_N1.clamp(min=1), (1 - sum_N1).clamp(min=0)


@dataclass(frozen=True)
class TopTokens:
    """The k likeliest tokens [N, k] of the target's distributions, likeliest first, in the target's numbers; and what else
    is learnt or measured of the distributions.

    log_probs_Nk: float32, at the temperature, over all tokens or over the draft vocabulary alone; log_sum_exp_N: float32, what
    was subtracted from logits / temperature to make them. best_N: the likeliest of all the target's tokens. next_log_prob_N:
    float32, of the given next tokens, over all tokens at temperature 1.
    """

    tokens_Nk: Tensor
    log_probs_Nk: Tensor
    log_sum_exp_N: Tensor
    best_N: Tensor
    next_log_prob_N: Tensor


@torch.no_grad()
def top_k_of(
    hidden_NH: Tensor, weight_TH: Tensor, k: int, ids_V: Tensor | None, temperature: float, next_tokens_N: Tensor
) -> TopTokens:
    """The k likeliest next tokens after each of N; a chunk of logits at a time.

    hidden_NH: the target's, after its final norm; weight_TH: its head. ids_V: the draft vocabulary, int64, ascending; None: all
    tokens. temperature: the soft labels'. next_tokens_N: int64, any token where the text has none.
    Raises ValueError for a k above the vocabulary.
    """
    vocabulary = len(weight_TH) if ids_V is None else len(ids_V)
    if not 0 < k <= vocabulary:
        raise ValueError(f"top_k: must be 1 to {vocabulary}, the tokens of the distribution, is {k}")
    chunk = chunk_tokens(len(weight_TH), hidden_NH.device)
    parts: list[tuple[Tensor, ...]] = []
    for start in range(0, max(1, len(hidden_NH)), chunk):
        part = slice(start, start + chunk)
        logits_CT = F.linear(hidden_NH[part], weight_TH).float()
        next_C1 = logits_CT.gather(-1, next_tokens_N[part, None]) - logits_CT.logsumexp(-1, keepdim=True)
        best_C = logits_CT.argmax(-1)
        scaled_CV = (logits_CT if ids_V is None else logits_CT[:, ids_V]) / temperature
        normalizer_C1 = scaled_CV.logsumexp(-1, keepdim=True)
        top_Ck, tokens_Ck = scaled_CV.topk(k)
        tokens_Ck = tokens_Ck if ids_V is None else ids_V[tokens_Ck]
        parts.append((tokens_Ck, top_Ck - normalizer_C1, normalizer_C1[:, 0], best_C, next_C1[:, 0]))
    return TopTokens(*(torch.cat(chunks) for chunks in zip(*parts, strict=True)))
