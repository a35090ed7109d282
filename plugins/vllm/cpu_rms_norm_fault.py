"""Reproduce a fault: on CPUs vLLM 0.32's rms_norm uses row 0 of a weight that has one row for each row of the input.

    python cpu_rms_norm_fault.py

DFlash drafts pass such a weight (`_normalize_context_k` in model_executor/models/qwen3_dflash.py).
"""

import torch
import vllm._custom_ops as ops

torch.manual_seed(0)
hidden, weight = torch.randn(3, 5, 64), torch.rand(3, 1, 64) + 0.5  # three layers
wanted = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6) * weight
found = torch.empty_like(hidden)
ops.rms_norm(found, hidden, weight.squeeze(1), 1e-6)
print("off by, layer by layer:", [float((found[layer] - wanted[layer]).abs().max()) for layer in range(3)])
with_first = wanted / weight * weight[0]
print("off from layer 0's weight for all:", float((found - with_first).abs().max()))
