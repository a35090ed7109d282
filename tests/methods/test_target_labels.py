"""Both methods' training on likeliest tokens that states hand out in the place of final hidden states."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from longspec.methods.contract import DraftOutput, DraftTrainer
from longspec.methods.eagle3.method import METHOD as EAGLE3
from longspec.methods.eagle3.settings import Settings
from longspec.methods.glide.method import METHOD as GLIDE
from longspec.methods.glide.settings import Draft
from longspec.states.declaration import top_k_of
from longspec.states.forward import STATES_ATTENTION, TargetStates
from longspec.states.tensors import FINAL, TOP
from tests.eager import EAGER
from tests.targets import SHAPES, TARGETS, VOCABULARY

B, S = 2, 24
IDS = tuple(range(1, VOCABULARY, 2))
GLIDES = {"anchors": "off", "lag_mode": "fixed", "lag": 2, "temperature": 1.7}
EAGLES = {"layers": (0, 1, 2), "steps": 3}
REDUCED = {"vocabulary": len(IDS), "ids": IDS, "target_vocabulary": VOCABULARY}
CASES: dict[str, tuple[Any, Any]] = {
    "glide": (GLIDE, Draft(**GLIDES)),
    "glide mix": (GLIDE, Draft(**GLIDES, loss="mix")),
    "eagle3": (EAGLE3, Settings(**EAGLES, **REDUCED)),
    "eagle3 all tokens": (EAGLE3, Settings(**EAGLES)),
}


class TopStates(TargetStates):
    """Of a target, as stored states with top_k hand them out; in float32, so that nothing is rounded."""

    def __init__(self, states: TargetStates, k: int, distribution: Any) -> None:
        super().__init__(states.target, attention=EAGER)
        self.k, self.distribution = k, distribution

    def forward(self, input_ids_BS: Tensor, *arguments: Any) -> dict[str, Tensor]:
        """All that is read, less the final hidden states."""
        found = super().forward(input_ids_BS, *arguments)
        ids, next_BS = self.distribution.ids, input_ids_BS.roll(-1, dims=1)
        ids_V = None if ids is None else torch.tensor(ids)
        final_NH = found.pop(FINAL).flatten(0, 1)
        top = top_k_of(final_NH, self.head_weight, self.k, ids_V, self.distribution.temperature, next_BS.flatten())
        return found | {name: tensor.unflatten(0, next_BS.shape) for name, tensor in zip(TOP, top, strict=True)}


@pytest.fixture(scope="module")
def states() -> TargetStates:
    torch.manual_seed(5)
    config = type(TARGETS["qwen2"])(**SHAPES | {"num_hidden_layers": 3})
    target = AutoModelForCausalLM.from_config(config, attn_implementation=STATES_ATTENTION)
    return TargetStates(target.requires_grad_(False).eval(), attention=EAGER)


def pair(states: TargetStates, name: str, k: int) -> tuple[DraftTrainer, DraftTrainer]:
    """One layer, trained beside the target and beside its likeliest tokens."""
    method, settings = CASES[name]
    torch.manual_seed(3)
    dense = method.trainer(states, settings, None)
    for parameter in dense.parameters():  # away from the special points of a fresh layer
        torch.nn.init.normal_(parameter, std=0.2)
    sparse = method.trainer(TopStates(states, k, method.learnt(settings)), settings, None)
    sparse.load_state_dict(dense.state_dict())
    return dense, sparse


def batch() -> dict[str, Tensor]:
    """Two documents a row, some labels missing."""
    ids = torch.randint(0, VOCABULARY, (B, S), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, ::5] = -100
    documents = (torch.arange(S) >= 10).long().expand(B, S)
    positions = torch.arange(S).expand(B, S) - 10 * documents
    return {"input_ids": ids, "labels": labels, "document_ids": documents, "position_ids": positions}


def outputs(trainers: tuple[DraftTrainer, DraftTrainer], **arguments: Any) -> list[DraftOutput]:
    return [trainer(**batch(), **arguments) for trainer in trainers]


@pytest.mark.parametrize("name", CASES)
def test_all_tokens_train_as_the_hidden_states_do(states: TargetStates, name: str) -> None:
    trainers = pair(states, name, len(IDS) if name == "eagle3" else VOCABULARY)
    arguments = CASES[name][0].each_step(CASES[name][1])
    for dense, sparse in (outputs(trainers, num_labels=9), outputs(trainers, **arguments)):
        for field in ("loss", "llm_loss", "agreement", "counts"):
            torch.testing.assert_close(getattr(sparse, field), getattr(dense, field), rtol=1e-5, atol=1e-6)
    gradients = [
        torch.autograd.grad(output.loss, list(trainer.parameters()))
        for output, trainer in zip(outputs(trainers), trainers, strict=True)
    ]
    for left, right in zip(*gradients, strict=True):
        assert (left - right).norm() <= 1e-4 * right.norm() + 1e-7


@pytest.mark.parametrize("name", CASES)
def test_few_tokens_measure_the_target_as_all_do(states: TargetStates, name: str) -> None:
    """The loss is below, since outcomes are merged; what is measured beside it does not change."""
    dense, sparse = outputs(pair(states, name, 5))
    assert 0 < sparse.loss < dense.loss
    torch.testing.assert_close((sparse.llm_loss, sparse.agreement), (dense.llm_loss, dense.agreement))
    assert sparse.counts == dense.counts
    unmeasured = pair(states, name, 5)[1](**batch(), with_llm_loss=False)
    assert unmeasured.llm_loss is None
    assert torch.equal(unmeasured.loss, sparse.loss)
