"""What is stored of a target's states: its bytes, its shapes, and the rounding of its numbers."""

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from longspec.states.declaration import bytes_a_token, decode, encode, stored_tensors

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
    torch.manual_seed(0)
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
    torch.manual_seed(0)
    keys_BKSD = torch.randn(2, 3, S, 8) * torch.tensor([1.0, 100.0, 1e-4])[:, None, None]
    encoded = encode({"keys.1": keys_BKSD}, stored_tensors(TARGET, ["keys.1"], "float8", None))
    assert encoded["keys.1"].shape == (2, S, 3, 8)
    assert encoded["keys.1.scale"].shape == (2, S, 3)
    found = decode(encoded, torch.float32)["keys.1"]
    assert found.shape == keys_BKSD.shape
    assert found.is_contiguous()
    torch.testing.assert_close(found, keys_BKSD, rtol=2**-4, atol=1e-6)
