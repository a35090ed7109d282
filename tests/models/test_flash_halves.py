"""flash-attn's private functions: another version of them is refused when it is imported, and not within a step."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from longspec.models.attention import flash


def forward(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dropout_p: Any,
    softmax_scale: Any,
    causal: Any,
    window_size_left: Any = -1,
    window_size_right: Any = -1,
    softcap: Any = 0.0,
) -> None:
    """As flash-attn 2.8 has it."""


def backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    softmax_lse: Any,
    dq: Any,
    dk: Any,
    dv: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dropout_p: Any,
    softmax_scale: Any,
    causal: Any,
    window_size_left: Any,
    window_size_right: Any,
    softcap: Any,
    alibi_slopes: Any,
    deterministic: Any,
) -> None:
    """The same."""


def other_order(k: Any, q: Any, v: Any, **others: Any) -> None:
    """Keys first."""


def without_window(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dropout_p: Any,
    softmax_scale: Any,
    causal: Any,
    window_size: Any,
) -> None:
    """As versions before 2.7 have it."""


def module(**changed: Any) -> Any:
    return SimpleNamespace(**{"_flash_attn_varlen_forward": forward, "_flash_attn_varlen_backward": backward} | changed)


@pytest.fixture(autouse=True)
def _package(monkeypatch: pytest.MonkeyPatch) -> None:
    package: Any = ModuleType("flash_attn")
    package.__version__ = "9.9"
    monkeypatch.setitem(sys.modules, "flash_attn", package)


def test_the_tested_functions_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """As plain functions, and as torch's custom operators, which take any call."""
    flash.check_halves.__wrapped__(module())
    operator = torch.library.custom_op(
        "longspec_tests::half", lambda q: q.clone(), mutates_args=(), schema="(Tensor q) -> Tensor"
    )
    operator._init_fn = forward
    flash.check_halves.__wrapped__(module(_flash_attn_varlen_forward=operator))


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("_flash_attn_varlen_forward", None),
        ("_flash_attn_varlen_forward", other_order),
        ("_flash_attn_varlen_forward", without_window),
        ("_flash_attn_varlen_backward", forward),
    ],
)
def test_others_are_refused_by_name_and_version(name: str, function: Any) -> None:
    told = (
        rf"runtime\.attention: flash-attn 9\.9 has no {name}\(.*window_size_left.*\), as flash-attn 2\.8 has; install that one"
    )
    with pytest.raises(ValueError, match=told):
        flash.check_halves.__wrapped__(module(**{name: function}))
