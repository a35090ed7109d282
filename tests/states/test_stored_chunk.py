"""A file of stored rows: its bytes, and which rows count after it was cut, damaged, or left by a builder of other states."""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from longspec.states.stored.chunk import ChunkWriter, Layout
from longspec.states.stored.declaration import Declaration, StoredTensor, bytes_a_token, stored_tensors
from longspec.states.stored.encoding import DTYPES, decode, encode
from longspec.states.tensors import StateTensor

S, FIRST, ROWS = 5, 64, 6
GLIDE = (StateTensor("keys.1", (8, 128)), StateTensor("values.1", (8, 128)))
FINAL = StateTensor("final", (512,))


def declaration(*tensors: StoredTensor, target: str = "t") -> Declaration:
    return Declaration(target, "k", "r", 100, S, "torch.float32", tensors, None, None)


SMALL = declaration(*stored_tensors((StateTensor("hidden.0", (3,)), StateTensor("keys.1", (2, 4))), "float8", None))


def drawn(layout: Layout, row: int) -> list[bytes]:
    return [random.Random(f"{row} {place}").randbytes(size) for place, size in enumerate(layout.sizes)]


def write(folder: Path, rows: list[int], of: Declaration = SMALL) -> ChunkWriter:
    """A chunk in work into which these rows were written."""
    chunk = ChunkWriter(folder, Layout(of, FIRST, ROWS))
    chunk.find()
    chunk.open()
    for row in rows:
        chunk.count(chunk.write(row, drawn(chunk.layout, row)))
    return chunk


def whole(folder: Path, of: Declaration = SMALL) -> ChunkWriter:
    chunk = write(folder, list(range(FIRST, FIRST + ROWS)), of)
    chunk.finish()
    return chunk


def missing(folder: Path, of: Declaration = SMALL) -> list[int]:
    """The rows that another builder would compute."""
    chunk = ChunkWriter(folder, Layout(of, FIRST, ROWS))
    chunk.find()
    return chunk.missing


@pytest.mark.parametrize(
    ("dtype", "reads", "size"),
    [
        ("bfloat16", GLIDE, 4096),
        ("bfloat16", (*GLIDE, FINAL), 4096 + 2 * 512),
        ("float8", GLIDE, 2048 + 2 * 8 * 4),
        ("float8", (*GLIDE, FINAL), 2048 + 2 * 8 * 4 + 512 + 4 + 4),
        ("float32", GLIDE, 8192),
        ("bfloat16", (*(StateTensor(f"hidden.{layer}", (512,)) for layer in (2, 16, 29)), FINAL), 8 * 512),
    ],
)
def test_bytes_of_a_token_in_the_files(tmp_path: Path, dtype: str, reads: tuple[StateTensor, ...], size: int) -> None:
    """GLIDE with 8 heads of 128: 4,096 with hard labels, with the final hidden state 2H more; EAGLE-3: 8H."""
    of = declaration(*stored_tensors(reads, dtype, None))
    chunk = whole(tmp_path, of)
    file = chunk.whole.stat().st_size - len(chunk.layout.header)
    assert file == ROWS * S * size
    assert bytes_a_token(of.tensors) == size


def test_likeliest_tokens_take_the_place_of_the_final_hidden_state(tmp_path: Path) -> None:
    of = declaration(*stored_tensors((*GLIDE, FINAL), "bfloat16", 64))
    assert bytes_a_token(of.tensors) == 4096 + 64 * (4 + 2) + 3 * 4
    file = load_file(whole(tmp_path, of).whole)
    shapes = {name: (tensor.dtype, *tensor.shape[2:]) for name, tensor in file.items()}
    assert shapes == {
        "keys.1": (torch.bfloat16, 8, 128),
        "values.1": (torch.bfloat16, 8, 128),
        "top_tokens": (torch.int32, 64),
        "top_log_probs": (torch.float16, 64),
        "log_sum_exp": (torch.float32,),
        "best_token": (torch.int32,),
        "next_log_prob": (torch.float32,),
    }


def test_safetensors_reads_it(tmp_path: Path) -> None:
    chunk = whole(tmp_path)
    assert chunk.whole.name == "rows-000064-000069.safetensors"
    found = load_file(chunk.whole)
    for place, tensor in enumerate(SMALL.tensors):
        assert found[tensor.name].shape == (ROWS, S, *tensor.token_shape)
        assert found[tensor.name].dtype == DTYPES[tensor.dtype]
        for row in range(FIRST, FIRST + ROWS):
            assert (
                found[tensor.name][row - FIRST].reshape(-1).view(torch.uint8).numpy().tobytes()
                == drawn(chunk.layout, row)[place]
            )


def test_rows_that_were_written_are_kept_whatever_was_killed(tmp_path: Path) -> None:
    assert missing(tmp_path) == list(range(FIRST, FIRST + ROWS))
    write(tmp_path, [64, 65]).close()
    assert missing(tmp_path) == [66, 67, 68, 69]
    chunk = write(tmp_path, [66, 67, 68, 69])
    chunk.close()  # all rows, and killed before the file was given its name
    assert missing(tmp_path) == []
    chunk = write(tmp_path, [])
    chunk.finish()
    assert missing(tmp_path) == []
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".safetensors"]


def test_a_journal_that_a_kill_left_beside_a_whole_chunk_goes(tmp_path: Path) -> None:
    chunk = whole(tmp_path)
    chunk.journal.write_text("")
    assert missing(tmp_path) == []
    assert not chunk.journal.exists()


def test_a_row_whose_line_is_missing_counts_for_nothing(tmp_path: Path) -> None:
    chunk = write(tmp_path, [64])
    chunk.write(65, drawn(chunk.layout, 65))
    chunk.close()
    assert missing(tmp_path) == [65, 66, 67, 68, 69]
    journal = chunk.journal.read_bytes()
    for cut in range(len(journal)):
        chunk.journal.write_bytes(journal[:cut])
        assert 64 in missing(tmp_path)


@pytest.mark.parametrize("of_whole", [True, False])
def test_a_file_cut_at_any_byte(tmp_path: Path, of_whole: bool) -> None:
    """Each row counts whose bytes are there, and no other."""
    if of_whole:
        whole(tmp_path)
    else:
        write(tmp_path, list(range(FIRST, FIRST + ROWS))).close()
    layout, file = Layout(SMALL, FIRST, ROWS), next(tmp_path.glob("rows-*.[ps]a*"))
    content = file.read_bytes()
    for cut in range(0, len(content), 7):
        file.write_bytes(content[:cut])
        there = [all(layout.place(n, row) + size <= cut for n, size in enumerate(layout.sizes)) for row in layout.rows]
        assert missing(tmp_path) == [row for row, is_there in zip(layout.rows, there, strict=True) if not is_there]


def test_a_flipped_bit_costs_its_row(tmp_path: Path) -> None:
    chunk = whole(tmp_path)
    content, layout = chunk.whole.read_bytes(), chunk.layout
    places = [(layout.place(n, row), size, row) for n, size in enumerate(layout.sizes) for row in layout.rows]
    for at in range(len(chunk.layout.header), len(content), 3):
        chunk.whole.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
        places = [
            (chunk.layout.place(n, row), size, row) for n, size in enumerate(chunk.layout.sizes) for row in chunk.layout.rows
        ]
        assert missing(tmp_path) == [row for start, size, row in places if start <= at < start + size]


def test_a_flipped_bit_in_the_checksums_costs_a_chunk_at_most_and_is_seen(tmp_path: Path) -> None:
    chunk = whole(tmp_path)
    content = chunk.sums.read_bytes()
    for at, bit in product(range(len(content)), (1, 128)):  # the last one makes it no text any more
        chunk.sums.write_bytes(content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :])
        again = ChunkWriter(tmp_path, chunk.layout)
        again.find()
        assert not again.is_done()
        assert all(line == chunk.lines[row] for row, line in again.lines.items())


def test_a_damaged_header_is_written_again_and_no_row(tmp_path: Path) -> None:
    chunk = whole(tmp_path)
    content = bytearray(chunk.whole.read_bytes())
    good = bytes(content)
    content[20] ^= 1
    chunk.whole.write_bytes(content)
    again = ChunkWriter(tmp_path, chunk.layout)
    again.find()
    assert not again.missing
    assert not again.is_done()
    again.open()
    again.finish()
    assert chunk.whole.read_bytes() == good


@pytest.mark.parametrize("leave", [whole, lambda folder: write(folder, [64, 66]).close()])
def test_rows_of_other_states_count_for_nothing(tmp_path: Path, leave: Callable[[Path], Any]) -> None:
    leave(tmp_path)
    other = replace(SMALL, target="another")
    assert missing(tmp_path, other) == list(range(FIRST, FIRST + ROWS))
    write(tmp_path, [65], other).close()
    assert missing(tmp_path, other) == [64, 66, 67, 68, 69]


def test_a_row_that_is_left_out_is_there(tmp_path: Path) -> None:
    chunk = write(tmp_path, [64, 65])
    chunk.count(chunk.layout.left_out(66, "not finite: final"))
    chunk.close()
    assert missing(tmp_path) == [67, 68, 69]
    chunk.journal.write_text(chunk.journal.read_text().replace('"row": 66', '"row": 67'))
    assert missing(tmp_path) == [66, 67, 68, 69]


def encoded_error(dtype: str, value: Tensor) -> Tensor:
    """What storage makes of [rows, S, H] hidden states: the error of each element."""
    tensors = stored_tensors([StateTensor("hidden.0", (value.shape[-1],))], dtype, None)
    found = decode(encode({"hidden.0": value}, tensors), tensors, torch.float32)["hidden.0"]
    return (found - value).abs()


def test_the_rounding_of_storage() -> None:
    """Within the bounds that encoding.py states, with elements of a token up to 10^5 times as large as others."""
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
    tensors = stored_tensors([StateTensor("keys.1", (3, 8))], "float8", None)
    encoded = encode({"keys.1": keys_BKSD}, tensors)
    assert encoded["keys.1"].shape == (2, S, 3, 8)
    assert encoded["keys.1.scale"].shape == (2, S, 3)
    found = decode(encoded, tensors, torch.float32)["keys.1"]
    assert found.shape == keys_BKSD.shape
    assert found.is_contiguous()
    torch.testing.assert_close(found, keys_BKSD, rtol=2**-4, atol=1e-6)
