"""Repair sampling with a draft on CPUs: vLLM 0.32 leaves the temperatures of the drafted tokens uninitialised there.

`_expand_kernel_impl` in vllm/utils/cpu_triton_utils.py writes into an int64 copy of its output and drops the copy. So
temperature, top-k and top-p of the expanded batch are uninitialised memory, and text is sampled from another distribution than
the target's, with every kind of draft.
"""

import torch
from torch import Tensor


def expand_batch_to_tokens(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """Repeat each request's value for each of its tokens. x: [B]; cu_num_tokens: [B], token counts up to and with a request."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    replaced = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return replaced.repeat_interleave(counts, output_size=num_tokens)


def repair() -> None:
    """Replace vLLM's function in this process by one that does what vLLM's docstring says."""
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
