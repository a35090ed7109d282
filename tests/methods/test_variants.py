"""A draft's final norm, and the families among the tests' targets."""

import torch

from longspec.methods.glide.attach import attach
from longspec.methods.glide.settings import Draft
from longspec.methods.glide.trainer import Glide
from tests.targets import TARGETS, VOCABULARY


def make(path: str, draft: Draft) -> Glide:
    torch.manual_seed(3)
    glide = attach(path, dtype=torch.float32, draft=draft)
    for parameter in glide.draft_model.parameters():  # fresh biases are zero, and hide what is wrong with them
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.1)
    return glide


def test_a_final_norm_starts_as_the_targets_own_and_is_trained(target_path: str) -> None:
    glide = attach(target_path, dtype=torch.float32, draft=Draft(anchors="off", lag_mode="fixed", final_norm=True))
    own = glide.draft_model.final_layernorm.weight
    assert torch.equal(own, glide.model.norm.weight)
    assert own.data_ptr() != glide.model.norm.weight.data_ptr()
    assert own.requires_grad
    assert "final_layernorm.weight" in glide.draft_model.state_dict()


def test_a_final_norm_stands_between_draft_and_head(target_path: str) -> None:
    """Scaling the draft's last hidden states changes nothing any more."""
    glide = make(target_path, Draft(anchors="off", lag_mode="fixed", loss="hard", final_norm=True))
    ids_BS = torch.randint(0, VOCABULARY, (1, 20))
    plain = glide(ids_BS, ids_BS).loss
    glide.draft_model.final_layernorm.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 3,))
    torch.testing.assert_close(glide(ids_BS, ids_BS).loss, plain, rtol=1e-4, atol=1e-5)


def test_every_family_is_among_the_targets() -> None:
    from longspec.methods.glide.settings import FAMILIES

    assert {config.model_type for config in TARGETS.values()} == set(FAMILIES)
