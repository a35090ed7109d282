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

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def forgotten_choices() -> None:
    fastest.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, *, flash: bool, triton: bool) -> None:
    module = "longspec.models.attention.flash"
    monkeypatch.setattr(f"{module}.find_spec", lambda name: object() if flash else None)
    monkeypatch.setattr(f"{module}.package", lambda: flash_stand_in) if flash else None
    monkeypatch.setattr(backends, "has_triton", lambda: triton)


def test_the_configuration_knows_exactly_the_backends() -> None:
    # With the tests' own reference where another file has brought it.
    assert (AUTO, *(name for name in BACKENDS if name != "eager")) == schema.ATTENTION


@pytest.mark.parametrize(
    ("flash", "triton", "dtype", "expected"),
    [
        (True, True, torch.bfloat16, FLASH),
        (True, True, torch.float32, FLEX),
        (False, True, torch.bfloat16, FLEX),
        (False, False, torch.bfloat16, SDPA),
    ],
)
def test_auto_takes_the_fastest_that_is_there(
    monkeypatch: pytest.MonkeyPatch, flash: bool, triton: bool, dtype: torch.dtype, expected: str
) -> None:
    install(monkeypatch, flash=flash, triton=triton)
    assert choose(AUTO, CUDA, dtype, 16) == expected
    assert choose(AUTO, CPU, dtype, 16) == SDPA


def test_heads_too_narrow_for_flex_attention_and_no_compiler_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, flash=False, triton=True)
    assert choose(AUTO, CUDA, torch.bfloat16, 8) == SDPA
    with pytest.raises(ValueError, match=r"flex_attention: heads of width 8 are below the 16 .*: set auto or sdpa"):
        choose(FLEX, CUDA, torch.bfloat16, 8)
    install(monkeypatch, flash=False, triton=False)
    with pytest.raises(ValueError, match="flex_attention: triton is not installed, so it cannot be compiled: set auto or sdpa"):
        choose(FLEX, CUDA, torch.bfloat16, 16)


@pytest.mark.parametrize(("dtype", "expected"), [(torch.bfloat16, FLASH), (torch.float32, SDPA)])
def test_trees_take_the_fastest_that_is_there(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, expected: str) -> None:
    install(monkeypatch, flash=True, triton=True)
    monkeypatch.setattr(backends, "_attend_tree", lambda *arguments: arguments[-1])
    for device, name in (("cuda", expected), ("cpu", SDPA)):
        q = SimpleNamespace(device=torch.device(device), dtype=dtype, shape=(1, 1, 1, 64), stride=lambda _: 1)
        tree = TreeVisibility((1,), torch.ones(1), torch.ones(1, 1, 1), torch.zeros(1), torch.zeros(1))
        assert attend(q, q, q, tree, 1.0) == name


def test_a_missing_backend_names_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, flash=False, triton=True)
    q = torch.randn(1, 1, 4, 8)
    message = r"flash_attention_2 is not installed: pip install '\.\[gpu\]' --no-build-isolation$"
    with pytest.raises(ValueError, match=message):
        choose(FLASH, CUDA, torch.bfloat16, 16)
    with pytest.raises(ValueError, match=message):
        attend(q, q, q, Visibility(), 1.0, FLASH)


def test_another_flash_attn_is_refused_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longspec.models.attention.flash.find_spec", lambda name: object())
    package = SimpleNamespace(__version__="2.8.3", flash_attn_interface=flash_stand_in)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    assert flash.package() is flash_stand_in
    package.__version__ = "2.7.4.post1"
    with pytest.raises(ValueError, match=r"runtime\.attention: flash-attn 2\.7\.4\.post1 is installed, 2\.8 is needed: pip"):
        choose(FLASH, CUDA, torch.bfloat16, 16)


@pytest.mark.parametrize(
    ("wanted", "device", "dtype", "message"),
    [
        ("flash", CUDA, torch.bfloat16, "'flash' is unknown; choose one of auto, flash_attention_2, flex_attention, sdpa"),
        (FLASH, CPU, torch.bfloat16, "flash_attention_2 runs on CUDA GPUs, this is a cpu: set auto or sdpa"),
        (FLASH, CUDA, torch.float32, "takes bfloat16 and float16, not torch.float32: set recipe.precision: bf16, or"),
        (FLEX, CPU, torch.float32, "flex_attention has no backward on a CPU, so nothing trains there: set auto or sdpa"),
    ],
)
def test_a_backend_that_cannot_train_here_is_refused(
    monkeypatch: pytest.MonkeyPatch, wanted: str, device: torch.device, dtype: torch.dtype, message: str
) -> None:
    install(monkeypatch, flash=True, triton=True)
    with pytest.raises(ValueError, match=rf"runtime\.attention: .*{message}"):
        choose(wanted, device, dtype, 16)


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
