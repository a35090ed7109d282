"""From training to decoding in one go: a step is trained, and what it drafts changes no token."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from longspec.decode.autoregressive import decode_plain
from longspec.decode.levels import DEFAULT_SHAPE
from longspec.decode.prefill import prefill
from longspec.decode.speculate import speculate
from longspec.methods.glide.attach import attach
from longspec.methods.glide.drafter import GlideDrafter
from longspec.methods.glide.settings import Draft
from longspec.methods.glide.trainer import Glide
from tests.targets import VOCABULARY, save_target

WINDOW, NEW, CHAIN, NO_EOS = 12, 24, 4, -1
# One of each family: tied heads, windows, stretched rotations, experts.
TARGETS = ("llama3-tied", "mistral-sliding", "qwen2-yarn", "qwen3-tied-sliding-first", "qwen3-experts")


def precision(path: str) -> torch.dtype:
    """float64, in which two ways of adding up never swap two tokens; torch's product of experts has none."""
    return torch.float32 if AutoConfig.from_pretrained(path).model_type == "qwen3_moe" else torch.float64


def trained(path: str) -> Glide:
    """A random draft after some steps on its target's own text, so that some of its tokens are accepted."""
    torch.manual_seed(2)
    draft = Draft(window=WINDOW, anchors="off", lag_mode="random", lag=CHAIN, final_norm=True)
    glide = attach(path, dtype=precision(path), draft=draft)
    optimizer = torch.optim.Adam(glide.draft_model.parameters(), lr=3e-3)
    text = decode_plain(glide.target, prefill(glide.target, [[1]]), 61, NO_EOS).ids
    ids_BS = torch.tensor([text] * CHAIN)
    for _ in range(15):
        optimizer.zero_grad()
        glide(ids_BS, ids_BS, lag=torch.arange(1, CHAIN + 1)).loss.backward()
        optimizer.step()
    return glide


@pytest.fixture(params=TARGETS)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return save_target(request.param, tmp_path)


@pytest.mark.slow
def test_what_is_decoded_is_what_the_target_generates(path: str) -> None:
    """Against transformers' own generate on its own attention, with prompts on both sides of every window."""
    glide = trained(path)
    own = AutoModelForCausalLM.from_pretrained(path, dtype=glide.target.dtype, attn_implementation="eager")
    prompts = [torch.randint(0, VOCABULARY, (length,)).tolist() if length > 1 else [1] for length in (1, 5, 30)]
    wanted, accepted = [], []
    for prompt in prompts:
        ids_BS = torch.tensor([prompt])
        whole = {"attention_mask": torch.ones_like(ids_BS), "pad_token_id": 0, "eos_token_id": None, "do_sample": False}
        wanted.append(own.generate(ids_BS, max_new_tokens=NEW, **whole)[0, len(prompt) :].tolist())
    for target in (glide.target, own):  # as attached, and as the evaluation loads it
        drafter = GlideDrafter(target, glide.draft_model, WINDOW)
        for shape in (CHAIN, DEFAULT_SHAPE):
            decoded = speculate(target, drafter, prompts, max_new_tokens=NEW, shape=shape)
            assert [row.ids for row in decoded.rows] == wanted
            accepted += [sum(row.accepted) for row in decoded.rows]
    assert sum(accepted) > 0
