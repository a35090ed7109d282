"""flash-attn's private functions: another version of them is refused when it is imported, and not within a step."""

import sys
from inspect import Parameter, Signature
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from longspec.models.attention import flash

# As flash-attn 2.8 has them.
EDGES = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale causal"
WINDOW = "window_size_left window_size_right softcap"


def taking(names: str) -> Any:
    """Return a function of these arguments."""

    def function(*_: Any) -> None:
        pass

    parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names.split()]
    function.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return function


forward = taking(f"q k v {EDGES} {WINDOW} alibi_slopes return_softmax")
backward = taking(f"dout q k v out softmax_lse dq dk dv {EDGES} {WINDOW} alibi_slopes deterministic")
other_order = taking(f"k q v {EDGES} {WINDOW}")
without_window = taking(f"q k v {EDGES} window_size")  # as versions before 2.7 have it


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
