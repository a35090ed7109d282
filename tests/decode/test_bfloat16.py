"""In bfloat16 no product is taken in float32: neither the target's, nor the draft's, nor its head's."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from longspec.decode.speculate import speculate
from tests.decode.models import DEPTHS, METHODS, make_drafter, make_target

PRODUCTS = ("mm", "addmm", "bmm", "linear", "scaled_dot_product_attention")


class Products(TorchDispatchMode):
    """The dtypes of all products of matrices, those of RoPE left out: angles are a product over one number, in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[tuple[str, torch.dtype]] = set()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        name = function.overloadpacket.__name__
        tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
        if name in PRODUCTS and not (name == "bmm" and tensors[0].shape[-1] == 1):
            self.dtypes |= {(name, each.dtype) for each in tensors}
        return function(*arguments, **named or {})


@pytest.mark.parametrize("ids", [None, tuple(range(3, 60, 4))])
@pytest.mark.parametrize("method", METHODS)
def test_every_product_is_taken_in_the_targets_dtype(method: str, ids: tuple[int, ...] | None) -> None:
    """With all of the target's tokens, and with a draft vocabulary; chains and a tree."""
    target = make_target(8, **DEPTHS[method]).to(torch.bfloat16)
    drafter = make_drafter(method, target, ids=ids)
    drafter.layer.to(torch.bfloat16)
    with Products() as seen:
        for shape in (3, (2, 3)):
            speculate(target, drafter, [[5, 9, 2, 7]], max_new_tokens=12, shape=shape)
    assert {dtype for _, dtype in seen.dtypes} == {torch.bfloat16}
    assert {"linear", "scaled_dot_product_attention"} <= {name for name, _ in seen.dtypes}
