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


def test_draws_follow_their_weights() -> None:
    """Five standard deviations; tokens of no weight never come."""
    weights_V, count = torch.tensor([0.0, 3.0, 1.0, 0.0, 6.0]), 20_000
    draws = Sampler(1.0, generator=torch.Generator().manual_seed(0)).draw(weights_V.expand(count, -1))
    shares_V, p_V = torch.bincount(draws, minlength=5) / count, weights_V / 10
    assert ((shares_V - p_V).abs() <= 5 * (p_V * (1 - p_V) / count).sqrt()).all()
