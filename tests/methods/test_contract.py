"""Every draft method's answers fit each other, and what is trained: those of the house, and one that a test made up."""

import re
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import Qwen2Config

from longspec import methods
from longspec.config import Recipe, Runtime
from longspec.decode.drafters import Drafter
from longspec.draft_vocabulary import DraftVocabulary
from longspec.methods.contract import Distribution, Method
from longspec.states.declaration import top_k_of
from longspec.states.forward import TargetStates
from longspec.states.tensors import FINAL, TOP, token_shape
from longspec.train.estimate.memory import setup_of
from tests.refusals import refused
from tests.targets import SHAPES, VOCABULARY, states_of
from tests.workflow import made_up
from tests.workflow.made_up import drafter as made_up_drafter
from tests.workflow.made_up import method as made_up_method
from tests.workflow.made_up import settings as made_up_settings

ROWS, LENGTH, POSITIONS = 3, 20, 4096
CONFIG = Qwen2Config(**SHAPES | {"num_hidden_layers": 3})  # as many layers as any method reads
IDS = tuple(range(0, VOCABULARY, 2))  # of a draft vocabulary
BLOCKS = {"layers": [1, 2], "depth": 2, "block_size": 4}
WHOLE = {"layers": [0, 1, 2], "vocabulary": None}
HEADS = {"num_attention_heads": 8, "head_dim": 12, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
# What a recipe may say of each method, of its `Draft` and its `Method`: every way in which its answers differ.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "dflash": [
        BLOCKS,
        {"layers": [2], "depth": 1, "block_size": 5, "vocabulary": len(IDS), "sliding_window": 7, "weights": "d_pace"},
        BLOCKS | {"loss": "hard", "tied_k_norm": False, "anchors": 3, "num_attention_heads": 8},
    ],
    "eagle3": [
        {"layers": [0, 1, 2], "vocabulary": len(IDS), "steps": 3},
        WHOLE | {"sliding_window": 9, "fc_norm": True, "norm_output": True},
        WHOLE | {"norm_before_residual": True, "norm_before_fc": True} | HEADS,
    ],
    "glide": [
        {"anchors": "random", "lag_mode": "random", "loss": "hard"},
        {"anchors": "off", "lag_mode": "blocks", "block": 3, "loss": "mix", "final_norm": True},
        {"anchors": "fixed", "lag_mode": "fixed", "lag": 2, "temperature": 1.7},
    ],
    "made_up": [{"labels": "hard"}, {"labels": "soft"}],
}
_MADE_UP = {"": made_up, ".settings": made_up_settings, ".method": made_up_method, ".drafter": made_up_drafter}
CASES = [(name, variant) for name, variants in VARIANTS.items() for variant in variants]


@pytest.fixture(autouse=True)
def with_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The made-up method stands among the others."""
    known = [*methods.names(), "made_up"]
    for name, module in _MADE_UP.items():
        monkeypatch.setitem(sys.modules, f"longspec.methods.made_up{name}", module)
    monkeypatch.setattr(methods, "names", lambda: known)


def test_every_method_is_here() -> None:
    assert methods.names() == list(VARIANTS)


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-{'-'.join(map(str, case[1].values()))}")
def recipe(request: pytest.FixtureRequest) -> Any:
    name, variant = request.param
    settings = methods.settings_of(name)
    of_draft = {field.name for field in fields(settings.Draft)}
    draft = settings.Draft(**{name: value for name, value in variant.items() if name in of_draft})
    method = settings.Method(**{name: value for name, value in variant.items() if name not in of_draft})
    recipe = OmegaConf.structured(Recipe(method=method, draft=draft, stage="base", seed=1))
    recipe.data.sequence_length = LENGTH
    settings.check(recipe)
    return recipe


def method_of(recipe: Any) -> tuple[Method, Any]:
    """A recipe's method and its settings, with the file of its draft vocabulary where it has one."""
    size = methods.vocabulary_size(recipe)
    return methods.method_of(recipe, None if size is None else DraftVocabulary(IDS, VOCABULARY, "", {}))


@pytest.fixture
def states() -> TargetStates:
    return states_of(CONFIG)


@pytest.fixture
def trainer(recipe: Any, states: TargetStates) -> Any:
    method, settings = method_of(recipe)
    return method.trainer(states, settings, None)


@pytest.fixture
def run(trainer: Any) -> Callable[..., Any]:
    """A forward over random text."""
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH))

    def forward(**arguments: Any) -> Any:
        return trainer(input_ids=ids, labels=ids, row_numbers=torch.arange(ROWS), **arguments)

    return forward


def tensors(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def test_what_is_planned_saved_and_counted_is_what_is_trained(recipe: Any, trainer: Any) -> None:
    """Checkpoints hold trained parameters alone, so a layer's state dict must hold nothing else."""
    method, settings = method_of(recipe)
    assert method.name == recipe.method.name
    with torch.device("meta"):
        planned = method.layer(trainer.states.config, settings)
    trained = {name: tuple(p.shape) for name, p in trainer.named_parameters() if p.requires_grad}
    assert trained == {f"draft_model.{name}": shape for name, shape in tensors(planned).items()}
    assert tensors(trainer).keys() == trained.keys()
    runtime = OmegaConf.structured(Runtime)
    setup = setup_of(trainer.states.config, recipe, runtime, 1, 1, torch.float32, torch.device("cpu"))
    assert setup.draft_parameters == sum(p.numel() for p in trainer.parameters())


@pytest.mark.parametrize("with_llm_loss", [True, False])
def test_what_is_read_is_what_is_told(recipe: Any, trainer: Any, run: Any, with_llm_loss: bool) -> None:
    method, settings = method_of(recipe)
    config, asked = trainer.states.config, []
    told = method.reads(config, settings, with_llm_loss=with_llm_loss)
    trainer.states.register_forward_hook(lambda _, arguments, found: asked.append((arguments[3], found)))
    output = run(with_llm_loss=with_llm_loss, **method.heaviest(settings))
    ((names, found),) = asked
    assert sorted(names) == sorted(told)
    for name in told:
        assert tuple(found[name][0, ..., 0, :].shape) == token_shape(config, name)
    assert (output.llm_loss is not None) == with_llm_loss


def test_the_heaviest_forward_trains_every_parameter(recipe: Any, trainer: Any, run: Any) -> None:
    """Its loss is a share of the labels that it is told."""
    method, settings = method_of(recipe)
    share = float(run(num_labels=40, **method.heaviest(settings)).loss.detach())
    output = run(num_labels=10, **method.heaviest(settings))
    assert output.loss.shape == ()
    assert output.loss.item() == pytest.approx(4 * share, rel=1e-5)
    output.loss.backward()
    for name, parameter in trainer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    assert all(p.grad is None and not p.requires_grad for p in trainer.states.target.parameters())


@pytest.mark.parametrize(("length", "num_labels"), [(LENGTH, 5), (LENGTH, None), (1, None)])
def test_rows_without_labels_have_zero_gradients(trainer: Any, length: int, num_labels: int | None) -> None:
    ids = torch.randint(0, VOCABULARY, (1, length))
    loss = trainer(ids, torch.full_like(ids, -100), num_labels=num_labels).loss
    loss.backward()
    assert loss.detach() == 0
    assert all(p.grad is not None and not p.grad.any() for p in trainer.draft_model.parameters())


def test_a_neighbour_changes_no_bit_of_a_documents_losses(trainer: Any) -> None:
    """Values and gradients of the labels of one document, when the documents on both sides of it change."""
    numbers = torch.repeat_interleave(torch.arange(3), torch.tensor([5, 9, 6]))[None]
    positions = torch.cat([torch.arange(5), torch.arange(9), torch.arange(6)])[None]
    ids = torch.randint(0, VOCABULARY, (1, LENGTH))
    other = torch.where(numbers == 1, ids, torch.randint(0, VOCABULARY, ids.shape))
    labels, results = ids.masked_fill(numbers != 1, -100), []
    for row in (ids, other):
        loss = trainer(row, labels, position_ids=positions, document_ids=numbers, num_labels=1).loss
        results.append([loss.detach(), *torch.autograd.grad(loss, list(trainer.draft_model.parameters()))])
    assert all(torch.equal(left, right) for left, right in zip(*results, strict=True))


def test_what_is_not_a_number_is_no_masked_zero(recipe: Any, trainer: Any, run: Any) -> None:
    """Whatever is read, also where the target would prefer a token that the draft cannot say."""
    method, settings = method_of(recipe)
    own = trainer.states.forward
    for read in method.reads(trainer.states.config, settings, with_llm_loss=False):

        def damaged(*arguments: Any, name: str = read) -> dict[str, Tensor]:
            found = own(*arguments)
            found[name][0, ..., 1, :] = torch.nan
            return found

        trainer.states.forward = damaged
        trainer.zero_grad()
        loss = run(with_llm_loss=False).loss
        assert loss.isnan(), read
        loss.backward()
        assert any(parameter.grad.isnan().any() for parameter in trainer.draft_model.parameters())


def test_every_drafted_step_has_its_loss(recipe: Any, run: Any) -> None:
    method, settings = method_of(recipe)
    with torch.no_grad():
        output = run(**method.each_step(settings))
    steps = (method.drafted_steps(settings),)
    assert (output.loss.shape, output.agreement.shape, output.llm_loss.shape) == (steps, steps, steps)


class TopStates(TargetStates):
    """Of a target, as stored states with top_k hand them out; in float32, so that nothing is rounded."""

    def __init__(self, states: TargetStates, k: int, learnt: Distribution) -> None:
        super().__init__(states.target)
        self.k, self.learnt = k, learnt

    def forward(self, input_ids_BS: Tensor, *arguments: Any) -> dict[str, Tensor]:
        """All that is read, less the final hidden states."""
        found = super().forward(input_ids_BS, *arguments)
        ids_V = None if self.learnt.ids is None else torch.tensor(self.learnt.ids)
        next_N, final_NH = input_ids_BS.roll(-1, dims=1).flatten(), found.pop(FINAL).flatten(0, 1)
        top = top_k_of(final_NH, self.head_weight, self.k, ids_V, self.learnt.temperature, next_N)
        return found | {name: tensor.unflatten(0, input_ids_BS.shape) for name, tensor in zip(TOP, top, strict=True)}


def test_likeliest_tokens_in_the_place_of_final_hidden_states(recipe: Any, trainer: Any, states: TargetStates) -> None:
    """All train as the hidden states do. With few, outcomes are merged: the loss is below, what is measured is the same."""
    method, settings = method_of(recipe)
    if (learnt := method.learnt(settings)) is None:
        return
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH))
    labels = ids.masked_fill(torch.arange(LENGTH) % 5 == 0, -100)
    dense, every, few = (
        trainer,
        *(method.trainer(TopStates(states, k, learnt), settings, None) for k in (len(learnt.ids or range(VOCABULARY)), 5)),
    )
    for parameter in dense.parameters():  # away from the special points of a fresh layer
        nn.init.normal_(parameter, std=0.2)
    outputs = []
    for made in (dense, every, few):
        made.load_state_dict(dense.state_dict())
        output = made(ids, labels, num_labels=9, **method.heaviest(settings))
        outputs.append((output, torch.autograd.grad(output.loss, list(made.parameters()))))
    (wanted, gradients), (found, of_found), (less, _) = outputs
    torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-5, atol=1e-6)
    for gradient, other in zip(gradients, of_found, strict=True):
        assert (other - gradient).norm() <= 1e-4 * gradient.norm()
    assert 0 < less.loss < wanted.loss
    for other in (found, less):
        torch.testing.assert_close((other.llm_loss, other.agreement), (wanted.llm_loss, wanted.agreement), rtol=1e-5, atol=1e-6)
        assert other.counts == wanted.counts


def drawn(recipe: Any, numbers: list[int], step: int) -> dict[int, tuple[list[int], dict[str, Any]]]:
    """What each row draws: its positions, and its part of each tensor."""
    method, settings = method_of(recipe)
    rows = [(number, np.arange(LENGTH)) for number in numbers]
    positions, draws = method.draws(settings, recipe.seed, step, rows, POSITIONS)
    return {
        number: (
            positions[place].tolist(),
            {name: value[place].tolist() if isinstance(value, Tensor) else value for name, value in draws.items()},
        )
        for place, number in enumerate(numbers)
    }


def test_draws_are_a_function_of_seed_step_and_row(recipe: Any, run: Any) -> None:
    """In any order, alone or side by side, and whatever the process has drawn before; a forward takes them."""
    together = drawn(recipe, [5, 9, 2], step=3)
    torch.manual_seed(77)
    np.random.seed(77)  # the global generator that must not be read
    assert drawn(recipe, [2, 5, 9], step=3) == together
    assert {number: drawn(recipe, [number], step=3)[number] for number in (5, 9, 2)} == together
    method, settings = method_of(recipe)
    _, draws = method.draws(settings, 1, 0, [(row, np.arange(LENGTH)) for row in range(ROWS)], POSITIONS)
    assert run(**draws).loss.isfinite()


def test_weights_come_back_from_their_file(recipe: Any, trainer: Any, states: TargetStates, tmp_path: Path) -> None:
    method, settings = method_of(recipe)
    for parameter in trainer.parameters():
        nn.init.normal_(parameter)
    own = trainer.draft_model.state_dict()
    with torch.device("meta"):
        planned = method.layer(states.config, settings)
    method.check_state(planned, own, "checkpoint")
    published = method.published({name: tensor.clone() for name, tensor in own.items()}, settings)
    save_file(published, tmp_path / "model.safetensors")
    layer = method.layer(states.config, settings)
    method.load(layer, tmp_path / "model.safetensors", states.config, settings)
    begun = method.trainer(states, settings, tmp_path / "model.safetensors").draft_model
    for found in (layer.state_dict(), begun.state_dict()):
        torch.testing.assert_close(found, own, rtol=0, atol=0)
    name = next(iter(own))
    for faulty in ({**own, name: own[name][:-1]}, {k: v for k, v in own.items() if k != name}, own | {"strange": own[name]}):
        with refused("here", re.compile(f"({name}|strange): ")):
            method.check_state(planned, faulty, "here")


def test_its_drafter_reads_what_the_target_has(recipe: Any, trainer: Any) -> None:
    method, settings = method_of(recipe)
    drafter = methods.drafter(method.name, trainer.states.target, trainer.draft_model, settings)
    assert isinstance(drafter, Drafter)
    drafter.check(trainer.states.target)
    with refused("draft: this drafter", "another target"):
        drafter.check(states_of(CONFIG).target)


def test_a_vocabulary_goes_one_way(recipe: Any, trainer: Any, states: TargetStates) -> None:
    """Into the settings of a method that is trained on its own, to the drafter of another, whoever hands it on."""
    vocabulary = DraftVocabulary(IDS, VOCABULARY, "", {})
    own = methods.has_own_vocabulary(recipe.method.name)
    method, settings = methods.method_of(recipe, vocabulary)
    assert (settings == methods.method_of(recipe)[1]) is not own
    proposes_all = own and recipe.method.vocabulary is None
    drafter = methods.drafter(method.name, states.target, trainer.draft_model, settings, vocabulary)
    assert drafter.proposed == (None if proposes_all else len(IDS))
