"""The target's distribution is warped as transformers' generate warps it."""

import pytest
import torch
from transformers import GenerationConfig

from longspec.decode.sampling import Sampler, first_of_largest
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


def test_the_greatest_is_torchs_argmax_with_ties_and_numbers_that_are_none() -> None:
    torch.manual_seed(0)
    for size in (1024 * 3, 128 * 5, 97):
        x_NV = torch.randint(0, 40, (9, size)).to(torch.bfloat16)  # the greatest stands many times
        x_NV[1, size // 2] = x_NV[2, -1] = float("inf")
        x_NV[3, 5] = x_NV[3, -1] = x_NV[4, -2] = float("nan")
        x_NV[5] = -float("inf")
        assert torch.equal(first_of_largest(x_NV), x_NV.argmax(-1))
