"""Which dtype target and draft run in on this machine."""

import torch


def resolve_dtype(precision: str, key: str = "recipe.precision") -> torch.dtype:
    """The dtype of "auto" (bfloat16 on a GPU that has it, else float32), "fastest" (the same, and bfloat16 on a
    processor that has instructions for it), "bf16" or "fp32".

    Raises ValueError, with the key, when this GPU lacks what is asked for.
    """
    has_bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    if precision == "bf16" and torch.cuda.is_available() and not has_bf16:
        raise ValueError(f"{key}: bf16, but this GPU has no bfloat16; set it to fp32")
    if precision == "fp32":
        return torch.float32
    if precision == "fastest" and not torch.cuda.is_available():  # else products of bfloat16 are slower than those of float32
        has_bf16 = any(torch.cpu.get_capabilities().get(name, False) for name in ("avx512_bf16", "amx_bf16"))
    return torch.bfloat16 if precision == "bf16" or has_bf16 else torch.float32
