"""Which backend a job takes, what it is told when it cannot have one, and what a target's hooks do with others' arguments."""

import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import MistralConfig, Qwen3Config

from longspec.config import schema
from longspec.models.attention import backends, flash
from longspec.models.attention.backends import AUTO, BACKENDS, FLASH, FLEX, SDPA, TARGET_ATTENTION, attend, choose, fastest
from longspec.models.attention.visibility import TreeVisibility, Visibility
from longspec.states.forward import STATES_ATTENTION
from tests.decode.models import generated, make_target
from tests.models import flash_stand_in
from tests.refusals import refused

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def forgotten_choices() -> None:
    fastest.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, *, flash: bool, triton: bool) -> None:
    module = "longspec.models.attention.flash"
    monkeypatch.setattr(f"{module}.find_spec", lambda name: None)
    monkeypatch.setattr(f"{module}.unusable", str) if flash else None
    monkeypatch.setattr(f"{module}.package", lambda: flash_stand_in) if flash else None
    monkeypatch.setattr(backends, "has_triton", lambda: triton)


def test_the_configuration_knows_exactly_the_backends() -> None:
    # With the tests' own reference where another file has brought it.
    assert (AUTO, *(name for name in BACKENDS if name != "eager")) == schema.ATTENTION


@pytest.mark.parametrize(
    ("flash", "triton", "dtype", "width", "expected"),
    [
        (True, True, torch.bfloat16, 16, FLASH),
        (True, True, torch.float32, 16, FLEX),
        (False, True, torch.bfloat16, 16, FLEX),
        (False, True, torch.bfloat16, 8, SDPA),
        (False, False, torch.bfloat16, 16, SDPA),
    ],
)
def test_auto_takes_the_fastest_that_is_there(
    monkeypatch: pytest.MonkeyPatch, flash: bool, triton: bool, dtype: torch.dtype, width: int, expected: str
) -> None:
    install(monkeypatch, flash=flash, triton=triton)
    assert choose(AUTO, CUDA, dtype, width) == expected
    assert choose(AUTO, CPU, dtype, width) == SDPA


@pytest.mark.parametrize(("dtype", "expected"), [(torch.bfloat16, FLASH), (torch.float32, SDPA)])
def test_trees_take_the_fastest_that_is_there(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, expected: str) -> None:
    install(monkeypatch, flash=True, triton=True)
    monkeypatch.setattr(backends, "_attend_tree", lambda *arguments: arguments[-1])
    for device, name in (("cuda", expected), ("cpu", SDPA)):
        q = SimpleNamespace(device=torch.device(device), dtype=dtype, shape=(1, 1, 1, 64), stride=lambda _: 1)
        tree = TreeVisibility((1,), torch.ones(1), torch.ones(1, 1, 1), torch.zeros(1), torch.zeros(1))
        assert attend(q, q, q, tree, 1.0) == name


def test_a_missing_backend_names_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, flash=False, triton=False)
    q = torch.randn(1, 1, 4, 8)
    told = (
        "runtime.attention: flash_attention_2",
        "pip install wheel ninja packaging && pip install -c constraints.txt --no-build-isolation flash-attn",
    )
    with refused(*told):
        choose(FLASH, CUDA, torch.bfloat16, 16)
    with refused(*told):
        attend(q, q, q, Visibility(), 1.0, FLASH)
    with refused("runtime.attention: flex_attention: triton", "set auto", "sdpa"):
        choose(FLEX, CUDA, torch.bfloat16, 16)


def test_another_flash_attn_is_refused_with_its_version_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else another backend is taken, as beside one that cannot be imported: a build for another torch."""
    monkeypatch.setattr("longspec.models.attention.flash.find_spec", lambda name: object())
    monkeypatch.setattr(backends, "has_triton", lambda: True)
    package = SimpleNamespace(__version__="2.8.3", flash_attn_interface=flash_stand_in)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    assert flash.package() is flash_stand_in
    package.__version__ = "2.7.4.post1"
    for broken, told in ((package, "flash-attn 2.7.4.post1"), (None, "cannot be imported")):
        monkeypatch.setitem(sys.modules, "flash_attn", broken)
        fastest.cache_clear()
        assert fastest("cuda", torch.bfloat16, 16, training=True) == FLEX
        assert fastest("cuda", torch.bfloat16, 16, training=False) == SDPA
        with refused("runtime.attention: flash_attention_2", told, "--no-build-isolation flash-attn"):
            choose(FLASH, CUDA, torch.bfloat16, 16)


@pytest.mark.parametrize(
    ("wanted", "device", "dtype", "width", "told"),
    [
        ("flash", CUDA, torch.bfloat16, 16, ("'flash'", "auto, flash_attention_2, flex_attention, sdpa")),
        (FLASH, CPU, torch.bfloat16, 16, ("flash_attention_2", "a cpu", "set auto", "sdpa")),
        (FLASH, CUDA, torch.float32, 16, ("flash_attention_2", "torch.float32", "recipe.precision: bf16")),
        (FLEX, CPU, torch.float32, 16, ("flex_attention", "CPU", "set auto", "sdpa")),
        (FLEX, CUDA, torch.bfloat16, 8, ("flex_attention", "width 8", "the 16", "set auto", "sdpa")),
    ],
)
def test_a_backend_that_cannot_train_here_is_refused(
    monkeypatch: pytest.MonkeyPatch, wanted: str, device: torch.device, dtype: torch.dtype, width: int, told: tuple[str, ...]
) -> None:
    install(monkeypatch, flash=True, triton=True)
    with refused("runtime.attention", *told):
        choose(wanted, device, dtype, width)


@pytest.mark.parametrize(("queries", "keys", "shown"), [(2, 5, "11110 11111"), (5, 2, "00 00 00 10 11")])
def test_the_stand_in_aligns_as_flash_attn_documents(queries: int, keys: int, shown: str) -> None:
    """The two pictures of its documentation."""
    seen = flash_stand_in._seen(queries, keys, -1)
    assert ["".join("01"[sees] for sees in row) for row in seen.int().tolist()] == shown.split()


IDS = torch.tensor([[5, 6, 7, 8, 9]])


@pytest.mark.parametrize(("attention", "family"), [(TARGET_ATTENTION, MistralConfig), (STATES_ATTENTION, Qwen3Config)])
def test_an_argument_that_would_change_attention_is_an_error(attention: str, family: type) -> None:
    """GPT-OSS's sinks and Gemma's soft cap, for two; what every layer hands over is none."""
    target = make_target(0, family)
    own = target(IDS).logits
    target.set_attn_implementation(attention)
    torch.testing.assert_close(target(IDS, output_hidden_states=True).logits, own)
    for name, value in {"relative_bias": torch.zeros(4), "softcap": 5.0, "is_causal": False}.items():
        with refused(name, "(longspec)"):
            target(IDS, **{name: value})


def test_padding_of_a_target_that_was_loaded_with_its_draft_is_an_error() -> None:
    """Its own generate would look at the padding; rows without any are its own text."""
    target = make_target(0)
    expected = generated(target, IDS[0].tolist(), 8)
    target.set_attn_implementation(STATES_ATTENTION)
    assert generated(target, IDS[0].tolist(), 8) == expected
    padded = {"input_ids": IDS.clone(), "attention_mask": torch.tensor([[0, 1, 1, 1, 1]])}
    with refused("attention_mask", "padding", "longspec.decode.generate"):
        target.generate(**padded, max_new_tokens=3, pad_token_id=0)
