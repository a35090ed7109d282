"""A target's states as they are stored, and back. Stored tensors are [B, S, *token_shape], those of a forward as of tensors.py.

Errors of storage: of bfloat16 at most 2^-8 of an element; of float8 (e4m3) at most 2^-4 of it, or 2^-18 of the largest of its
token and head where that is more. float32 stores what is computed.

Shapes: B rows, S tokens, K key/value heads, D head width; N tokens, C tokens of a chunk, H hidden width, T target's vocabulary,
V the tokens that the distributions are over, k likeliest of them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from longspec.models import losses
from longspec.states.declaration import DTYPES, SCALE, Tensors
from longspec.states.tensors import KEYS, TOP, VALUES

FLOAT8_MAX = torch.finfo(torch.float8_e4m3fn).max
LEAST_SCALE = torch.finfo(torch.float32).tiny


def _with_heads_last(name: str, tensor: Tensor) -> Tensor:
    """[B, K, S, D] of a forward as [B, S, K, D] of the files, and back; other tensors as they are."""
    return tensor.transpose(1, 2) if name.startswith((KEYS, VALUES)) else tensor


def encode(found: dict[str, Tensor], tensors: Tensors) -> dict[str, Tensor]:
    """Return the stored tensors of a forward's, contiguous, on its device; the likeliest tokens are among `found` already."""
    encoded = {}
    for name, (dtype, *_) in tensors.items():
        if name.endswith(SCALE):
            continue
        value = _with_heads_last(name, found[name])
        if dtype == "F8_E4M3":
            value = value.float()
            scale = value.abs().amax(-1, keepdim=True).div_(FLOAT8_MAX).clamp_(min=LEAST_SCALE)
            encoded[name + SCALE] = scale[..., 0].contiguous()
            value = value / scale
        encoded[name] = value.to(DTYPES[dtype]).contiguous()
    return encoded


def decode(encoded: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return a forward's tensors of the stored ones, the target's in `dtype`, those of the likeliest tokens as they are."""
    found = {}
    for name, value in encoded.items():
        if not name.endswith(SCALE):
            scale = encoded.get(name + SCALE)
            value = value if scale is None else value.float().mul_(scale.unsqueeze(-1))
            value = value if name in TOP else value.to(dtype)
            found[name] = _with_heads_last(name, value).contiguous()
    return found


@torch.no_grad()
def top_k_of(
    hidden_NH: Tensor, weight_TH: Tensor, k: int, ids_V: Tensor | None, temperature: float, next_tokens_N: Tensor
) -> tuple[Tensor, ...]:
    """Return the tensors of tensors.TOP, in its order, for the next tokens after each of N; a chunk of logits at a time.

    Tokens are in the target's numbers, the other numbers float32, and the log-probabilities at the temperature and over the
    draft vocabulary alone where there is one; the best token and the next one's log-probability are over all tokens at 1.
    hidden_NH: the target's, after its final norm; weight_TH: its head. ids_V: the draft vocabulary, int64, ascending; None: all
    tokens. temperature: the soft labels'. next_tokens_N: int64, any token where the text has none.
    """
    chunk = losses.chunk_tokens(len(weight_TH), hidden_NH.device)
    parts = []
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
    return tuple(torch.cat(chunks) for chunks in zip(*parts, strict=True))
