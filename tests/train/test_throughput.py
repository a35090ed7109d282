"""A row's derived numbers, against closed forms and the operating system."""

import pytest
import torch
from omegaconf import OmegaConf
from transformers import Qwen2Config

from longspec.config import Runtime, compose
from longspec.data.pack.arrow_shards import PackedRows
from longspec.data.schedule import TrainedRows
from longspec.distributed import Ranks
from longspec.methods import method_of
from longspec.train.estimate import flops
from longspec.train.metrics import costs_of
from longspec.train.micro_batches import StepBatches
from tests.corpus import Corpus


def test_a_rows_numbers(corpus: Corpus) -> None:
    """Speed, operations of the whole global batch on both ranks, utilisation against both ranks' peak."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen2Config(hidden_size=32, intermediate_size=48, num_hidden_layers=2, **heads)
    rows, recipe = PackedRows(corpus.answers), compose("train", ["run=demo", "recipe.global_batch=6"]).recipe
    ranks, runtime = Ranks(0, 0, 2), OmegaConf.structured(Runtime(peak_tflops=2.0))
    batches = StepBatches(TrainedRows(rows), recipe, 1, ranks, 4096)
    made = {"step": 3, "tokens": 6 * rows.sequence_length, "seconds": 1.5}
    row = costs_of(made, batches, config, runtime, torch.device("cpu"), torch.float32)
    numbers = [int(number) for number in batches.row_numbers(2)]
    documents = flops.document_lengths(rows, numbers)
    assert sum(documents) < 6 * rows.sequence_length  # some padding
    labels = sum(int(rows[n].loss_mask_S.sum()) for n in numbers)
    method, settings = method_of(recipe)
    tokens = 6 * rows.sequence_length
    expected = sum(flops.operations(config, method, settings, tokens, documents, labels, with_llm_loss=True))
    assert row["flops"] == expected
    assert row["mfu"] == pytest.approx(expected / 1.5 / 4e12)
    assert row["tokens_per_second"] == 4 * rows.sequence_length
    assert row["peak_rss_bytes"] > 2**20
