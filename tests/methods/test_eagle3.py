"""EAGLE-3's training forward against plain PyTorch, chain by chain, in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, Qwen3Config

from longspec.methods.eagle3 import method as eagle3_method
from longspec.methods.eagle3.method import METHOD
from longspec.methods.eagle3.settings import Settings
from longspec.methods.eagle3.trainer import Eagle3Trainer
from longspec.models import losses
from tests.eager import EAGER
from tests.methods import eagle3_reference as reference
from tests.targets import SHAPES, VOCABULARY, states_of

THREE = SHAPES | {"num_hidden_layers": 3}
CONFIGS = {"llama": LlamaConfig(**THREE), "qwen3": Qwen3Config(**THREE, head_dim=16)}
LAYERS = (0, 1, 2)
IDS = tuple(range(1, VOCABULARY, 2))
REDUCED = {"vocabulary": len(IDS), "ids": IDS, "target_vocabulary": VOCABULARY}


@pytest.fixture(autouse=True)
def small_chunks(exact_norms: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "chunk_tokens", lambda *_: 5)


def make(name: str = "llama", dtype: torch.dtype = torch.float64, attention: str = EAGER, **settings: Any) -> Eagle3Trainer:
    torch.manual_seed(3)
    made = METHOD.trainer(states_of(CONFIGS[name], dtype, attention), Settings(layers=LAYERS, **settings), None)
    for parameter in made.draft_model.parameters():  # away from the special points of a fresh layer
        torch.nn.init.normal_(parameter, std=0.3)
    return made


def plain(made: Eagle3Trainer) -> reference.Draft:
    config, settings = made.states.config, made.settings
    return reference.Draft(
        state=dict(made.draft_model.named_parameters()),
        heads=(config.num_attention_heads, config.num_key_value_heads),
        eps=config.rms_norm_eps,
        head_TH=made.states.head_weight,
        ids=list(settings.ids or range(config.vocab_size)),
        steps=settings.steps,
        decay=settings.decay,
        window=settings.sliding_window,
        norm_output=settings.norm_output,
        norm_before_residual=settings.norm_before_residual,
    )


def text_of(made: Any, ids_S: Tensor, labels_S: Tensor) -> reference.Text:
    """A document's hidden states as transformers itself gives them."""
    target = made.states.target
    with torch.no_grad():
        out = target.model(ids_S[None], output_hidden_states=True, attention_backend=EAGER)
    embedded_SH = out.hidden_states[0][0]

    def rope(position: int) -> tuple[Tensor, Tensor]:
        cos, sin = target.model.rotary_emb(embedded_SH[None], torch.tensor([[position]]))
        return cos[0, 0], sin[0, 0]

    auxiliary = [out.hidden_states[layer][0] for layer in made.layers]
    return reference.Text(embedded_SH, auxiliary, out.last_hidden_state[0], labels_S, rope)


def compare(made: Any, loss: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    """Same value and same gradients, to this relative difference."""
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=0)
    names, parameters = zip(*made.draft_model.named_parameters(), strict=True)
    got = torch.autograd.grad(3 * loss, parameters)
    wanted = torch.autograd.grad(3 * expected, parameters)
    for name, left, right in zip(names, got, wanted, strict=True):
        assert right.norm() > 0, name
        assert (left - right).norm() <= tolerance * right.norm(), name


def compare_steps(made: Any, ids: Tensor, labels: Tensor, output: Any, sums: list[Any], count: int) -> None:
    """Each drafted step is the mean over what is reached there."""
    with torch.no_grad():
        steps = made(ids, labels, each_step=True)
    for step in range(count):
        reached, inside = sum(each.reached[step] for each in sums), sum(each.inside[step] for each in sums)
        lost = sum(each.losses[step].item() for each in sums)
        assert float(steps.loss[step]) == pytest.approx(lost / inside, rel=1e-9)
        assert float(steps.agreement[step]) == pytest.approx(sum(each.agreements[step] for each in sums) / reached)
    assert float(output.agreement) == pytest.approx(float(steps.agreement[0]))


def masked(ids: Tensor, *, every: int | None = 3) -> Tensor:
    """Labels of which some are none."""
    labels = ids.clone()
    if every is not None:
        labels[..., ::every] = -100
        labels[..., : ids.shape[-1] // 4] = -100
    return labels


@pytest.mark.parametrize(
    ("settings", "every"),
    [
        ({"steps": 1}, None),
        ({"steps": 7, **REDUCED, "decay": 0.5}, 3),
        ({"steps": 3, "sliding_window": 4, "fc_norm": True, **REDUCED}, None),
        ({"steps": 5, "norm_output": True, "decay": 1.0, **REDUCED}, 3),
        ({"steps": 4, "norm_before_residual": True, **REDUCED}, 3),
        ({"steps": 3, "norm_before_fc": True, "fc_norm": True, "norm_output": True, "norm_before_residual": True}, 3),
    ],
    ids=lambda value: (
        "-".join(f"{name}={part}" for name, part in value.items() if name != "ids") if isinstance(value, dict) else ""
    ),
)
def test_a_text_is_as_its_chains_one_by_one(settings: dict[str, Any], every: int | None) -> None:
    made = make(**settings)
    ids = torch.randint(0, VOCABULARY, (2, 16))
    labels = masked(ids, every=every)
    output = made(ids, labels, num_labels=11)
    sums = [reference.document_sums(plain(made), text_of(made, *row)) for row in zip(ids, labels, strict=True)]
    compare(made, output.loss, reference.weighted(plain(made), sums) / 11)
    assert int(output.counts["outside_vocabulary"]) == sum(sum(each.reached) - sum(each.inside) for each in sums)
    compare_steps(made, ids, labels, output, sums, made.settings.steps)


def packed_row(lengths: list[int], padding: int) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """Documents; their row with positions and document ids."""
    documents = [torch.randint(0, VOCABULARY, (length,)) for length in lengths]
    ids = torch.cat([*documents, torch.zeros(padding, dtype=torch.long)])
    positions = torch.cat([torch.arange(length) for length in (*lengths, padding)])
    numbers = torch.repeat_interleave(torch.tensor([*range(len(lengths)), -1]), torch.tensor([*lengths, padding]))
    return documents, ids[None], positions[None], numbers[None]


@pytest.mark.parametrize(
    ("name", "settings", "first_masked", "attention"),
    [
        ("llama", {"steps": 7, **REDUCED}, True, EAGER),
        ("qwen3", {"steps": 4, "sliding_window": 6, "fc_norm": True}, False, "sdpa"),
        ("llama", {"steps": 3, "norm_output": True}, False, "sdpa"),
    ],
)
def test_packed_documents_are_as_if_alone(name: str, settings: dict[str, Any], first_masked: bool, attention: str) -> None:
    """Documents shorter and longer than a chain, and padding; whether or not each one's first label is masked already."""
    made = make(name, attention=attention, **settings)
    lengths = [9, 1, 2, 3, 14]
    documents, ids, positions, numbers = packed_row(lengths, 5)
    labels = ids.clone()
    labels[numbers == -1] = -100
    if first_masked:
        labels[positions == 0] = -100
    output = made(ids, labels, position_ids=positions, document_ids=numbers, num_labels=1)
    own = [torch.cat([torch.tensor([-100]), document[1:]]) for document in documents]
    sums = [reference.document_sums(plain(made), text_of(made, *each)) for each in zip(documents, own, strict=True)]
    compare(made, output.loss, reference.weighted(plain(made), sums))


def test_an_identity_start_reads_the_target_at_its_last_auxiliary_layer() -> None:
    """Token t's hidden states there, through the target's own norm and head, are the untrained draft's guess of token t + 2."""
    torch.manual_seed(3)
    states = states_of(CONFIGS["llama"], torch.float64, EAGER)
    target = states.target
    ids = torch.randint(0, VOCABULARY, (2, 20))
    found = METHOD.trainer(states, Settings(layers=LAYERS, steps=3, start="identity"), None)(ids, ids, each_step=True).loss
    output = target(ids, output_hidden_states=True, attention_backend=EAGER)
    guess = target.lm_head(target.model.norm(output.hidden_states[LAYERS[-1]])).log_softmax(-1)
    teacher = output.logits.softmax(-1)
    for step in range(3):  # the draft's own hidden states are fed back as they are
        wanted = -(teacher[:, 1 + step : -1] * guess[:, : -2 - step]).sum(-1).mean()
        torch.testing.assert_close(found[step], wanted, rtol=1e-6, atol=0)


B, S = 2, 20


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"), [("llama", {"steps": 7, **REDUCED}), ("qwen3", {"steps": 2, "fc_norm": True, "sliding_window": 5})]
)
def test_a_step_is_counted_as_torch_counts_it(name: str, settings: dict[str, object]) -> None:
    """Dense attention multiplies every pair of the text; a chain's own few keys are no product to torch."""
    made = make(name, dtype=torch.float32, **settings)
    ids = torch.randint(0, VOCABULARY, (B, S))
    labels = ids.clone()
    labels[:, ::3] = -100
    trained = labels[:, 1:] != -100
    found = made.states(ids, torch.arange(S).expand(B, S), None, ["hidden.0", "hidden.1", "hidden.2", "final"])
    made.states.forward = lambda *_: found
    with FlopCounterMode(display=False) as counter:
        made(ids, labels).loss.backward()
    config, chosen, steps = made.states.config, made.settings, range(made.settings.steps)
    chains = [S - 2 - step for step in steps]
    rows = sum(int(trained[:, 1 + step :].sum()) for step in steps)
    wanted = eagle3_method.projection_operations(config, chosen, B * (S - 2)) + eagle3_method.head_operations(
        config, chosen, int(trained.sum()), rows
    )
    wanted += sum(eagle3_method.step_operations(config, B * count, B * count * count) for count in chains)
    assert counter.get_total_flops() == wanted
