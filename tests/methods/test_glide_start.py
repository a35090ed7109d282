"""How a GLIDE draft begins: as a copy of a layer of its target, against that layer itself, and with a norm at its end."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from longspec.config import compose
from longspec.methods.glide.attach import attach
from longspec.methods.glide.layer import fresh_layer
from longspec.methods.glide.settings import Draft
from longspec.models.attention.visibility import Visibility
from longspec.states.forward import TargetStates
from tests.targets import VOCABULARY, save_target

TOKENS = 12


def draft(start: str) -> Draft:
    return Draft(anchors="off", lag_mode="random", start=start)


@pytest.mark.parametrize("start", ["last", "middle"])
def test_without_its_cross_attention_it_is_that_layer(target_path: str, start: str) -> None:
    target = AutoModelForCausalLM.from_pretrained(target_path, dtype=torch.float32, attn_implementation="eager").eval()
    for vector in (parameter for parameter in target.parameters() if parameter.ndim == 1):
        torch.nn.init.normal_(vector, 1.0, 0.3)  # norms and biases that tell one from another
    layers: Any = target.model.layers
    chosen, last = layers[-1 if start == "last" else len(layers) // 2], layers[-1]
    layer = fresh_layer(TargetStates(target), draft(start)).eval()
    torch.testing.assert_close(layer.cross_attn.q_proj.weight, last.self_attn.q_proj.weight, rtol=0, atol=0)
    torch.testing.assert_close(layer.cross_attn.o_proj.weight, last.self_attn.o_proj.weight, rtol=0, atol=0)
    torch.testing.assert_close(layer.post_self_attention_layernorm.weight, last.input_layernorm.weight, rtol=0, atol=0)
    position_ids = torch.arange(TOKENS)[None]
    embedded_BSH = target.model.embed_tokens(torch.randint(VOCABULARY, (1, TOKENS)))
    rope = target.model.rotary_emb(embedded_BSH, position_ids)
    hidden = torch.full((TOKENS, TOKENS), torch.finfo(torch.float32).min).triu(1)[None, None]
    with torch.no_grad():
        layer.cross_attn.o_proj.weight.zero_()
        own = layer.own_keys_values(embedded_BSH, rope)
        seen = Visibility()
        found = layer(embedded_BSH, rope, own, own, seen, seen)
        wanted = chosen(embedded_BSH, attention_mask=hidden, position_embeddings=rope, position_ids=position_ids)
    torch.testing.assert_close(found, wanted[0] if isinstance(wanted, tuple) else wanted, rtol=1e-5, atol=1e-5)


def test_a_layer_of_experts_is_refused(tmp_path: Any) -> None:
    target = AutoModelForCausalLM.from_pretrained(save_target("qwen3-experts", tmp_path), dtype=torch.float32)
    with pytest.raises(ValueError, match=r"^recipe\.draft\.start: last: .* experts"):
        fresh_layer(TargetStates(target), draft("last"))


def test_a_stored_target_has_no_layers_to_copy() -> None:
    overrides = ["run=demo", "variant=base", "stage=long", "recipe.states.source=offline"]
    compose("train", overrides)
    with pytest.raises(ValueError, match=r"^recipe\.draft\.start: middle: copies a layer of the target, which is not there"):
        compose("train", [*overrides, "recipe.draft.start=middle"])


def test_a_final_norm_starts_as_the_targets_own_and_stands_before_the_head(target_path: str) -> None:
    """Scaling the draft's last hidden states changes nothing any more."""
    glide = attach(target_path, dtype=torch.float32, draft=Draft(anchors="off", lag_mode="fixed", loss="hard", final_norm=True))
    own = glide.draft_model.final_layernorm.weight
    assert torch.equal(own, glide.model.norm.weight)
    assert own.data_ptr() != glide.model.norm.weight.data_ptr()
    assert own.requires_grad
    for parameter in glide.draft_model.parameters():  # fresh biases are zero, and hide what is wrong with them
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.1)
    ids_BS = torch.randint(0, VOCABULARY, (1, 20))
    plain = glide(ids_BS, ids_BS).loss
    glide.draft_model.final_layernorm.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 3,))
    torch.testing.assert_close(glide(ids_BS, ids_BS).loss, plain, rtol=1e-4, atol=1e-5)
