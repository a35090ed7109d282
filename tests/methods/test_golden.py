"""EAGLE-3's and DFlash's training against what the package `speculators` 0.9.0 makes of the same weights and documents.

tests/golden/eagle3/make.py and tests/golden/dflash/make.py say how its numbers were made. What differs is brought to one
formula without touching either loss. Theirs is a divergence, ours a cross entropy: the target's own entropy, a constant, lies
between them. Ours leaves out where the target prefers a token outside the draft vocabulary: their masks name the same ones.

EAGLE-3: theirs divides each step by its predictions, ours all steps by one number: the documents' first tokens are not trained,
so that every step has as many, and that number is what `num_labels` is here. DFlash: theirs divides by the blocks' labels, ours
by `num_labels`; ours has weights that add up to 1, and counts each of the drawn anchors for all that there could be.

Shapes: S tokens, M chains of a step, A blocks, K predicted slots of a block, H hidden width, T target's vocabulary, V draft
vocabulary.
"""

import json
import re
from dataclasses import dataclass, replace
from math import exp
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from longspec.methods.dflash.method import METHOD as DFLASH
from longspec.methods.dflash.settings import Settings as DFlashSettings
from longspec.methods.eagle3.method import METHOD as EAGLE3
from longspec.methods.eagle3.settings import Settings as Eagle3Settings
from longspec.states.forward import STATES_ATTENTION, TargetStates
from tests.eager import EAGER

FOLDER = Path(__file__).parents[1] / "golden"
K_NORM = "layers.{}.self_attn.k_norm.weight"
pytestmark = [pytest.mark.parametrize("number", ["0", "1"]), pytest.mark.parametrize("attention", [EAGER, "sdpa"])]


@dataclass(frozen=True)
class Golden:
    about: dict[str, Any]
    tensors: dict[str, Tensor]
    layer: str  # what theirs is called in ours

    @classmethod
    def read(cls, method: str, layer: str = "layers.0.") -> "Golden":
        with safe_open(FOLDER / method / "speculators.safetensors", "pt") as opened:
            names = opened.keys()
            return cls(json.loads(opened.metadata()["about"]), {name: opened.get_tensor(name) for name in names}, layer)

    def below(self, *path: str) -> dict[str, Tensor]:
        """The tensors under a path, by the rest of their names."""
        start = "".join(f"{part}/" for part in path)
        found = {name.removeprefix(start): tensor for name, tensor in self.tensors.items() if name.startswith(start)}
        return {re.sub(r"^layers\.0\.", self.layer, name): tensor for name, tensor in found.items()}

    def trainer(self, method: Any, settings: Any, draft: str, attention: str) -> Any:
        """The draft beside its target, as training makes it."""
        about, weights = self.about, self.below(draft, "weights")
        target = LlamaForCausalLM._from_config(LlamaConfig(**about["target"]), attn_implementation=STATES_ATTENTION)
        target.load_state_dict(self.below("target"))
        if "d2t" in weights:
            offsets_V = weights.pop("d2t")
            ids = tuple((offsets_V + torch.arange(len(offsets_V))).tolist())
            settings = replace(settings, vocabulary=len(ids), ids=ids, target_vocabulary=about["target"]["vocab_size"])
        made = method.trainer(TargetStates(target.requires_grad_(False).eval(), attention=attention), settings, None)
        made.draft_model.load_state_dict({name: weights[name] for name in made.draft_model.state_dict()})
        return made


def teacher_of(made: Any, ids_S: Tensor) -> tuple[Tensor, Tensor]:
    """Of each token [S]: entropy of the next one over the draft vocabulary, and whether the likeliest one lies in it."""
    logits_ST = made.states.target(ids_S[None], attention_backend=EAGER).logits[0]
    ids_V = torch.arange(logits_ST.shape[-1]) if made.draft_model.ids_V is None else made.draft_model.ids_V
    p_SV = logits_ST[:, ids_V].softmax(-1)
    return -(p_SV * p_SV.log()).sum(-1), torch.isin(logits_ST.argmax(-1), ids_V)


def check_gradients(layer: nn.Module, loss: Tensor, wanted: dict[str, Tensor], tolerance: float) -> None:
    """Every weight's, to a part of its norm."""
    names, parameters = zip(*layer.named_parameters(), strict=True)
    assert set(names) == set(wanted)
    for name, got in zip(names, torch.autograd.grad(loss, parameters), strict=True):
        assert (got - wanted[name]).norm() <= tolerance * wanted[name].norm(), name


@pytest.mark.parametrize("draft", ["reduced", "norms"])
def test_chains_have_their_logits_losses_and_gradients(draft: str, attention: str, number: str) -> None:
    """Their slots at a row's end, which predict what follows the document, are none of ours."""
    golden = Golden.read("eagle3", "midlayer.")
    of_all = {name: golden.about[name] for name in ("steps", "decay")}
    settings = Eagle3Settings(layers=tuple(golden.about["layers"]), **of_all, **golden.about["drafts"][draft])
    made = golden.trainer(EAGLE3, settings, draft, attention)
    document, layer, settings, taken = golden.below(draft, number), made.draft_model, made.settings, list[Tensor]()
    ids_S, entropy_S, is_inside_S = document["ids"], *teacher_of(made, document["ids"])
    with layer.lm_head.register_forward_pre_hook(lambda _, inputs: taken.extend(inputs[0])):
        losses = made(ids_S[None], ids_S[None], each_step=True).loss
    entropies = []
    for step, (rows_MH, theirs_SV) in enumerate(zip(taken, document["logits"], strict=True)):
        assert len(rows_MH) == len(ids_S) - 2 - step  # fewer predictions than the step before
        torch.testing.assert_close(rows_MH @ layer.lm_head.weight.T, theirs_SV[: len(rows_MH)], rtol=0, atol=1e-4)
        entropies.append(entropy_S[1 + step : -1][is_inside_S[1 + step : -1]].mean())
    torch.testing.assert_close(losses - torch.stack(entropies), document["step_losses"], rtol=1e-5, atol=0)

    labels_S = ids_S.where(document["trained"], -100)
    loss = made(ids_S[None], labels_S[None], num_labels=int(document["count"])).loss
    counts_S = is_inside_S & document["trained"].roll(-1)
    assert counts_S.sum() == document["count"]
    weights = sum(settings.decay**step for step in range(settings.steps))
    torch.testing.assert_close(loss - weights * entropy_S[counts_S].mean(), document["loss"], rtol=1e-5, atol=0)
    check_gradients(layer, loss, golden.below(draft, number, "gradient"), 1e-5)


def arguments(row: dict[str, Tensor]) -> dict[str, Any]:
    """Of a training forward, whose anchors are theirs."""
    ids_S, numbers_S = row["ids"], row["documents"]
    starts = [int((numbers_S == number).nonzero()[0]) for number in numbers_S]
    positions_S = torch.arange(len(ids_S)) - torch.tensor(starts)
    return {
        "input_ids": ids_S[None],
        "labels": ids_S.where(row["trained"], -100)[None],
        "position_ids": positions_S[None],
        "document_ids": numbers_S[None],
        "priority": torch.zeros(1, len(ids_S)).index_fill(1, row["anchors"], 1.0),
    }


@pytest.mark.parametrize("draft", ["full", "reduced"])
def test_blocks_have_their_logits_loss_and_gradients(draft: str, attention: str, number: str) -> None:
    golden = Golden.read("dflash")
    shape = golden.about["shape"] | {"layers": tuple(golden.about["shape"]["layers"])} | golden.about["drafts"][draft]
    made = golden.trainer(DFLASH, DFlashSettings(**shape), draft, attention)
    row, layer = golden.below(draft, number), made.draft_model
    made.settings = settings = replace(made.settings, anchors=len(row["anchors"]))
    rows: list[Tensor] = []
    with layer.norm.register_forward_hook(lambda _, __, out: rows.append(out)):
        output = made(**arguments(row), num_labels=1)
    head_VH = made.states.head_weight if layer.lm_head is None else layer.lm_head.weight
    places_AK = row["anchors"][:, None] + torch.arange(1, settings.block_size)
    trained_AK = row["trained"][places_AK]
    torch.testing.assert_close(rows[0] @ head_VH.T, row["logits"][:, 1:][trained_AK], rtol=0, atol=1e-4)

    parts = [teacher_of(made, row["ids"][row["documents"] == document]) for document in row["documents"].unique()]
    entropy_S, is_inside_S = (torch.cat(each) for each in zip(*parts, strict=True))
    counts_AK = trained_AK & is_inside_S[places_AK - 1]
    assert counts_AK.sum() == row["count"]
    weights_K = torch.tensor([exp(-slot / settings.gamma) for slot in range(settings.predicted)])
    starts = row["documents"][1:] == row["documents"][:-1]
    anchors_there_can_be = (row["trained"][1:] & starts).sum()
    scale = weights_K.sum() * len(row["anchors"]) / anchors_there_can_be / row["count"]
    own = (weights_K * entropy_S[places_AK - 1] * counts_AK).sum() / row["count"]
    torch.testing.assert_close(output.loss * scale - own, row["loss"], rtol=1e-4, atol=0)

    wanted = golden.below(draft, number, "gradient")
    if settings.tied_k_norm:
        wanted[K_NORM.format(0)] = sum(wanted.pop(K_NORM.format(number)) for number in range(settings.depth))
    check_gradients(layer, output.loss * scale, wanted, 1e-4)
