"""The target's distribution is warped as transformers' generate warps it."""

import pytest
import torch
from transformers import GenerationConfig

from longspec.decode.sampling import Sampler
from tests.decode.models import make_target

WARPS = [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.3, 5, 1.0), (1.0, 0, 0.6), (0.8, 7, 0.9), (2.0, 100, 0.05)]


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), WARPS)
def test_warps_are_those_of_generate(temperature: float, top_k: int, top_p: float) -> None:
    """Against the list of processors that generate itself puts together, and applies to float32."""
    target, logits_NV = make_target(0), torch.randn(50, 61) * 4
    config = GenerationConfig(do_sample=True, temperature=temperature, top_k=top_k, top_p=top_p)
    config, _ = target._prepare_generation_config(config)
    processors = target._get_logits_processor(config, input_ids_seq_length=3, device="cpu")
    wanted = processors(torch.zeros(50, 3, dtype=torch.int64), logits_NV).softmax(-1)
    torch.testing.assert_close(Sampler(temperature, top_k, top_p).log_probabilities(logits_NV).exp(), wanted)
