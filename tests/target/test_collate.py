import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from longspec.data.pack.arrow_shards import Row
from longspec.models.losses import NO_LABEL
from longspec.target.train import collate, new_model
from tests.corpus import Corpus


def row_of(lengths: list[int], padding: int, draw: np.random.Generator) -> Row:
    """A row of random documents, written down here without the packer."""
    total = sum(lengths) + padding
    ids = draw.integers(1, 275, total).astype(np.int32)
    mask = np.ones(total, np.uint8)
    mask[np.cumsum([0, *lengths[:-1]])] = 0
    mask[total - padding :] = 0
    documents = [number for number, length in enumerate(lengths) for _ in range(length)] + [-1] * padding
    positions = [place for length in [*lengths, padding] for place in range(length)]
    return Row(ids, mask, np.array(documents, np.int32), np.array(positions, np.int32), list(range(len(lengths))))


def test_a_packed_row_costs_what_its_documents_cost_alone(corpus: Corpus, tmp_path) -> None:
    draw = np.random.default_rng(0)
    layouts = [([20, 3, 17], 8), ([48], 0), ([2, 46], 0), ([40], 8)]
    rows = [row_of(lengths, padding, draw) for lengths, padding in layouts]
    model = new_model(corpus.build, 0)
    model.save_pretrained(tmp_path)
    eager = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    inputs, labels_BS = collate(rows)
    loss_BS = cross_entropy(model(**inputs).logits.transpose(1, 2), labels_BS, reduction="none", ignore_index=NO_LABEL)
    for row, (lengths, _) in enumerate(layouts):
        start = 0
        for length in lengths:
            alone_1S = torch.from_numpy(rows[row].input_ids_S[start : start + length]).long()[None]
            expected = cross_entropy(eager(alone_1S).logits[0, :-1], alone_1S[0, 1:], reduction="none")
            torch.testing.assert_close(loss_BS[row, start : start + length - 1], expected, atol=1e-5, rtol=0)
            start += length
        labels = sum(lengths) - len(lengths)
        assert int((labels_BS[row] != NO_LABEL).sum()) == labels
