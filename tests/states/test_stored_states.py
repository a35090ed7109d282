"""Training from stored states against training beside the target: losses and gradients, what is held, stored and read."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from longspec.atomic_files import read_json
from longspec.config import differences
from longspec.data.pack.arrow_shards import PackedRows
from longspec.data.schedule import TrainedRows
from longspec.distributed import Ranks
from longspec.draft_vocabulary import read_draft_vocabulary
from longspec.methods import method_of
from longspec.models.draft_attention import rotations
from longspec.models.target import load_target
from longspec.models.target_config import read_target_config
from longspec.states.declaration import bytes_a_token, checked_config, decode, encode, stored_tensors
from longspec.states.load import StoredStates, load_states
from longspec.train.micro_batches import StepBatches
from longspec.workflow.states import folder_name
from tests.states.conftest import StatesOf
from tests.states.stored import Stored

ONE, CPU, FLOAT32 = Ranks(0, 0, 1), torch.device("cpu"), torch.float32
HARD = "recipe.draft.loss=hard"


def trainer_of(stored: Stored, states: Any) -> Any:
    """A seeded draft beside states."""
    recipe = stored.config.recipe
    vocabulary = None if stored.vocabulary is None else read_draft_vocabulary(stored.vocabulary)
    torch.manual_seed(3)
    method, settings = method_of(recipe, vocabulary)
    return method.trainer(states, settings, None)


def target_of(stored: Stored) -> tuple[str, Any]:
    path = read_json(stored.target)["path"]
    return path, checked_config(path, stored.config.recipe)


def online(stored: Stored) -> Any:
    path, config = target_of(stored)
    return trainer_of(stored, load_states(path, config, stored.config.runtime, CPU, FLOAT32))


def offline(stored: Stored, shards: int = 1, *, held_out: bool = False) -> Any:
    path, config = target_of(stored)
    rows = stored.rows(shards) + (stored.rows(held_out=True)[::-1] if held_out else [])
    return trainer_of(stored, load_states(path, config, stored.config.runtime, CPU, FLOAT32, rows))


def results(stored: Stored, trainer: Any, *, micro_batch: int = 2, steps: int = 2, **more: Any) -> list[tuple[Tensor, ...]]:
    """Loss, target's loss, agreement and gradients of some micro batches."""
    rows, recipe = PackedRows(stored.data), stored.config.recipe
    batches, found = StepBatches(TrainedRows(rows), recipe, micro_batch, ONE, 400), []
    for step in range(steps):
        batch = batches.load(step, batches.micro_batches(step)[0])
        output = trainer(**batch, num_labels=100, **more)
        gradients = torch.autograd.grad(output.loss, list(trainer.draft_model.parameters()))
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        told = [output.llm_loss, output.agreement]
        found.append((output.loss.detach(), *[value for value in told if value is not None], flat))
    return found


@pytest.mark.parametrize(("method", "more"), [("glide", []), ("glide", [HARD]), ("eagle3", []), ("dflash", [])])
def test_float32_states_train_as_the_target_beside(tmp_path: Path, states_of: StatesOf, method: str, more: list[str]) -> None:
    """Bit by bit where forwards have the same rows, else to 1e-6 of the loss; hard labels have no loss of the target's own."""
    for built in (1, 4):
        named = ["recipe.states.dtype=float32", f"runtime.micro_batch={built}", *more]
        stored = states_of(method, tmp_path / str(built), *named)
        with_target, from_files = online(stored), offline(stored, shards=built)
        assert ("final" in from_files.states.read([0])) == (not more)
        for micro_batch in (1, 2):
            asked: dict[str, Any] = {"micro_batch": micro_batch, "with_llm_loss": not more}
            pairs = zip(*(results(stored, trainer, **asked) for trainer in (with_target, from_files)), strict=True)
            for wanted, found in pairs:
                if (built, micro_batch) == (1, 1):
                    assert all(torch.equal(left, right) for left, right in zip(wanted, found, strict=True))
                else:
                    torch.testing.assert_close(found[0], wanted[0], rtol=1e-6, atol=0)
                    assert float((found[-1] - wanted[-1]).norm() / wanted[-1].norm()) < 1e-5


@pytest.mark.parametrize(
    ("method", "dtype", "loss", "gradient"), [("glide", "bfloat16", 2e-3, 0.03), ("eagle3", "float8", 2e-2, 0.3)]
)
def test_the_rounding_of_storage_moves_losses_little(
    tmp_path: Path, states_of: StatesOf, method: str, dtype: str, loss: float, gradient: float
) -> None:
    """By these shares of them. The random target's activations are no smoother than a real one's."""
    stored = states_of(method, tmp_path, f"recipe.states.dtype={dtype}")
    for wanted, found in zip(results(stored, online(stored)), results(stored, offline(stored)), strict=True):
        torch.testing.assert_close(found[0], wanted[0], rtol=loss, atol=0)
        torch.testing.assert_close(found[1], wanted[1], rtol=loss, atol=0)
        assert 0 < float((found[-1] - wanted[-1]).norm() / wanted[-1].norm()) < gradient


@pytest.mark.parametrize(("method", "tokens"), [("glide", 275), ("eagle3", 40)])
def test_all_tokens_as_the_likeliest_ones_are_the_whole_distribution(
    tmp_path: Path, states_of: StatesOf, method: str, tokens: int
) -> None:
    """To the rounding of log-probabilities in float16."""
    stored = states_of(method, tmp_path, "recipe.states.dtype=float32", f"recipe.states.top_k={tokens}")
    for wanted, found in zip(results(stored, online(stored)), results(stored, offline(stored)), strict=True):
        torch.testing.assert_close(found[0], wanted[0], rtol=2e-3, atol=0)
        torch.testing.assert_close(found[1], wanted[1], rtol=1e-5, atol=1e-5)
        assert torch.equal(found[2], wanted[2])


def test_a_block_draft_trains_on_the_states_that_a_chain_draft_has_stored(tmp_path: Path, states_of: StatesOf) -> None:
    """In the same folder, of the layers that it reads and of another one; nothing is computed for it."""
    float32, shared = "recipe.states.dtype=float32", "recipe.method.stored_layers=[0,1,2]"
    for more in ([], ["recipe.states.top_k=9"]):
        chain, block = (states_of(name, tmp_path, float32, *more) for name in ("eagle3", "dflash"))
        block = block.like(tmp_path, shared)
        assert block.declaration() == chain.declaration()
        assert folder_name(block.config.recipe, "v") == folder_name(chain.config.recipe, "v")
    chain, block = states_of("eagle3", tmp_path, float32), states_of("dflash", tmp_path, float32, shared)
    chain.rows()
    for wanted, found in zip(results(block, online(block)), results(block, offline(block)), strict=True):
        torch.testing.assert_close(found[0], wanted[0], rtol=1e-6, atol=0)
        assert float((found[-1] - wanted[-1]).norm() / wanted[-1].norm()) < 1e-5
    assert block.batches == 0


@pytest.mark.parametrize(("method", "more"), [("glide", [HARD]), ("eagle3", ["recipe.states.top_k=9"]), ("dflash", [HARD])])
def test_held_out_rows_have_states_of_their_own(tmp_path: Path, states_of: StatesOf, method: str, more: list[str]) -> None:
    """With final hidden states also for hard labels. Few likeliest tokens merge others' outcomes: the loss is lower."""
    stored = states_of(method, tmp_path, "recipe.states.dtype=float32", "runtime.held_out_rows=3", *more)
    from_files, with_target = offline(stored, held_out=True), online(stored)
    source = stored.computation(held_out=True).source
    method_object, settings = method_of(stored.config.recipe)
    for row in range(len(source.rows)):
        ids = source.batch([row])[0]
        asked = {"labels": ids, "row_numbers": torch.tensor([~row]), **method_object.each_step(settings)}
        wanted, found = with_target(ids, **asked), from_files(ids, **asked)
        assert torch.equal(wanted.agreement, found.agreement)
        if HARD in more:
            torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-5, atol=0)
        else:
            assert ((found.loss > 0) & (found.loss <= wanted.loss)).all()
            assert found.loss.sum() < wanted.loss.sum()


def test_every_family_without_its_layers(any_target_path: str) -> None:
    """Embeddings, rotations, norm and head are the whole target's."""
    config = read_target_config(any_target_path)
    whole = load_target(any_target_path, config, FLOAT32)
    without = StoredStates(any_target_path, config, FLOAT32, "sdpa", []).target
    ids_BS, positions_BS = torch.arange(24).view(2, 12), torch.arange(12).expand(2, 12) + 700
    embedded_BSH = whole.model.embed_tokens(ids_BS)
    assert torch.equal(without.model.embed_tokens(ids_BS), embedded_BSH)
    pairs = zip(*(rotations(target.model, embedded_BSH, positions_BS) for target in (whole, without)), strict=True)
    assert all(torch.equal(left, right) for left, right in pairs)
    assert torch.equal(without.lm_head.weight, whole.lm_head.weight)
    assert torch.equal(without.model.norm.weight, whole.model.norm.weight)
    held = {name for name, _ in without.named_parameters()}
    assert held | {"lm_head.weight"} == {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}


def test_what_states_hang_on(tmp_path: Path, states_of: StatesOf) -> None:
    """A learning rate changes nothing; dtype, loss, k, temperature and vocabulary do, and the folder's name too."""
    glide, top, warm = states_of("glide", tmp_path), "recipe.states.top_k=5", "recipe.draft.temperature=2"

    def named(*changes: str) -> tuple[str, dict[str, Any]]:
        changed = glide.like(tmp_path, *changes)
        return folder_name(changed.config.recipe), changed.declaration()

    assert named("recipe.optimizer.lr=0.5", "recipe.seed=3", warm) == named()
    changes = ([], ["recipe.states.dtype=float8"], [HARD], ["recipe.precision=bf16"], [top], [top, warm])
    folders, declared = zip(*(named(*each) for each in changes), strict=True)
    assert folders[0].startswith("last-keys-values-final-bfloat16-")
    assert len(set(folders)) == len(changes)
    assert [declared.count(each) for each in declared] == [1] * len(changes)
    assert "temperature: 1.0 -> 2.0" in differences(declared[-2], declared[-1])
    whole, eagle3 = states_of("eagle3", tmp_path), states_of("eagle3", tmp_path, top)
    of_vocabularies = [{folder_name(each.config.recipe, name) for name in "ab"} for each in (whole, eagle3)]
    assert list(map(len, of_vocabularies)) == [1, 2], "a vocabulary counts for likeliest tokens alone"
    other = Stored(tmp_path, eagle3.overrides, eagle3.target, eagle3.data, tmp_path / "draft_vocabulary_40.json")
    content = read_draft_vocabulary(eagle3.vocabulary)
    replace(content, ids=tuple(range(40))).write(other.vocabulary)
    assert [line.split(":")[0] for line in differences(eagle3.declaration(), other.declaration())] == ["vocabulary"]


S = 5
TARGET = LlamaConfig(hidden_size=512, num_attention_heads=8, num_key_value_heads=8, head_dim=128)
GLIDE = ("keys.1", "values.1")


@pytest.mark.parametrize(
    ("dtype", "reads", "top_k", "size"),
    [
        ("bfloat16", (*GLIDE, "final"), None, 4096 + 2 * 512),
        ("float8", GLIDE, None, 2048 + 2 * 8 * 4),
        ("float8", (*GLIDE, "final"), None, 2048 + 2 * 8 * 4 + 512 + 4 + 4),  # a scale, and the most likely token
        ("float32", GLIDE, None, 8192),
        ("bfloat16", ("hidden.2", "hidden.16", "hidden.29", "final"), None, 8 * 512),
        ("bfloat16", (*GLIDE, "final"), 64, 4096 + 64 * (4 + 2) + 3 * 4),
    ],
)
def test_bytes_of_a_token(dtype: str, reads: tuple[str, ...], top_k: int | None, size: int) -> None:
    """GLIDE with 8 heads of 128: 4,096 with hard labels, with the final hidden state 2H more; EAGLE-3: 8H."""
    tensors = stored_tensors(TARGET, reads, dtype, top_k)
    assert bytes_a_token(tensors) == size
    found = {name: torch.zeros((1, 8, S, 128) if name in GLIDE else (1, S, 512)) for name in reads}
    found |= {name: torch.zeros(1, S, *shape) for name, (_, *shape) in tensors.items() if name not in found}
    encoded = encode(found, tensors)
    assert sum(tensor.nbytes for tensor in encoded.values()) == S * size
    assert {name: [*tensor.shape] for name, tensor in encoded.items()} == {n: [1, S, *of] for n, (_, *of) in tensors.items()}


def encoded_error(dtype: str, value: Tensor) -> Tensor:
    """What storage makes of [rows, S, H] hidden states: the error of each element."""
    found = decode(encode({"hidden.0": value}, stored_tensors(TARGET, ["hidden.0"], dtype, None)), torch.float32)["hidden.0"]
    return (found - value).abs()


def test_the_rounding_of_storage() -> None:
    """Within the bounds that declaration.py states, with elements of a token up to 10^5 times as large as others."""
    value = torch.randn(4, 50, 64) * torch.exp(2 * torch.randn(4, 50, 64))
    value[:, :, 0] *= 1000  # as in a target's first token
    assert not encoded_error("float32", value).any()
    assert bool((encoded_error("bfloat16", value) <= 2**-8 * value.abs()).all())
    largest = value.abs().amax(-1, keepdim=True)
    bound = torch.maximum(2**-4 * value.abs(), 2**-18 * largest)
    assert bool((encoded_error("float8", value) <= bound).all())
    assert not encoded_error("float8", torch.zeros(1, 3, 8)).any()
    assert bool((encoded_error("float8", torch.full((1, 1, 8), 1e-38)) <= 1e-39).all())


def test_keys_come_back_in_their_heads_each_with_its_own_scale() -> None:
    keys_BKSD = torch.randn(2, 3, S, 8) * torch.tensor([1.0, 100.0, 1e-4])[:, None, None]
    encoded = encode({"keys.1": keys_BKSD}, stored_tensors(TARGET, ["keys.1"], "float8", None))
    assert encoded["keys.1"].shape == (2, S, 3, 8)
    assert encoded["keys.1.scale"].shape == (2, S, 3)
    found = decode(encoded, torch.float32)["keys.1"]
    assert found.shape == keys_BKSD.shape
    assert found.is_contiguous()
    torch.testing.assert_close(found, keys_BKSD, rtol=2**-4, atol=1e-6)
