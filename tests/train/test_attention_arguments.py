"""What a target's own attention hooks do with arguments and masks that are not theirs."""

import pytest
import torch
from transformers import MistralConfig, Qwen3Config

from longspec.models.attention.backends import TARGET_ATTENTION
from longspec.states.forward import STATES_ATTENTION
from tests.decode.models import generated, make_target

IDS = torch.tensor([[5, 6, 7, 8, 9]])


@pytest.mark.parametrize(("attention", "family"), [(TARGET_ATTENTION, MistralConfig), (STATES_ATTENTION, Qwen3Config)])
def test_an_argument_that_would_change_attention_is_an_error(attention: str, family: type) -> None:
    """GPT-OSS's sinks and Gemma's soft cap, for two; what every layer hands over is none."""
    target = make_target(0, family)
    own = target(IDS).logits
    target.set_attn_implementation(attention)
    torch.testing.assert_close(target(IDS, output_hidden_states=True).logits, own)
    for name, value in {"relative_bias": torch.zeros(4), "softcap": 5.0, "is_causal": False}.items():
        with pytest.raises(ValueError, match=rf"{name}: not known to this attention \(longspec\)"):
            target(IDS, **{name: value})


def test_padding_of_a_target_that_was_loaded_with_its_draft_is_an_error() -> None:
    """Its own generate would look at the padding; rows without any are its own text."""
    target = make_target(0)
    expected = generated(target, IDS[0].tolist(), 8)
    target.set_attn_implementation(STATES_ATTENTION)
    assert generated(target, IDS[0].tolist(), 8) == expected
    padded = {"input_ids": IDS.clone(), "attention_mask": torch.tensor([[0, 1, 1, 1, 1]])}
    with pytest.raises(ValueError, match=r"attention_mask: .* knows no padding; .* longspec.decode.generate"):
        target.generate(**padded, max_new_tokens=3, pad_token_id=0)
