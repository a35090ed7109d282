"""The target as its draft sees it when its states are read from files: its layers are never loaded.

Shapes: B rows, S tokens.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from longspec.models.target import load_target, without_layers
from longspec.states.forward import FrozenTarget
from longspec.states.stored.encoding import decode
from longspec.states.stored.stored_rows import StoredRows


def held_out_number(row: int) -> int:
    """By which the states of a held-out row are asked for, beside those of the rows that are trained."""
    return -1 - row


def load_without_layers(path: str, config: Any, dtype: torch.dtype) -> Any:
    """transformers' model of a target's folder with embedding, rotations, final norm and head alone."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # else it reports all weights of all layers as not expected
    try:
        return load_target(path, without_layers(config), dtype)
    finally:
        logging.set_verbosity(level)


class StoredStates(FrozenTarget):
    """Stored states of training rows, and of held-out ones under their own numbers; a face like forward.TargetStates.

    config: of the whole target; attention: the draft's backend. Rows that were left out have states of zeros, and must have no
    labels.
    """

    def __init__(
        self,
        path: str,
        config: Any,
        dtype: torch.dtype,
        attention: str,
        rows: StoredRows,
        held_out: StoredRows | None = None,
    ) -> None:
        super().__init__(load_without_layers(path, config, dtype))
        self.config, self.attention, self.rows, self.held_out = config, attention, rows, held_out
        self._ahead: dict[tuple[int, ...], dict[str, Tensor]] = {}

    def gather(self, _: list[nn.Parameter]) -> AbstractContextManager[Any]:
        """Nothing is partitioned."""
        return nullcontext()

    def follow(self, device: torch.device) -> None:
        """Move what there is of the target to its draft's device."""
        self.target.to(device)

    def prefetch(self, row_numbers: Sequence[int]) -> None:
        """Read the rows of a forward to come; another thread may, while the forward before it runs.

        Raises ValueError for held-out rows where no states of such are given.
        """
        numbers = tuple(int(number) for number in row_numbers)
        if numbers not in self._ahead:
            self._ahead[numbers] = self._read(numbers)

    def _read(self, numbers: tuple[int, ...]) -> dict[str, Tensor]:
        source: StoredRows = self.rows
        rows = list(numbers)
        if numbers[0] < 0:
            if self.held_out is None:
                raise ValueError(
                    "--held-out-states: missing; give the shard.json of python -m longspec.states build --held-out"
                )
            source, rows = self.held_out, [held_out_number(number) for number in numbers]
        return source.read(rows, pinned=self.head_weight.device.type == "cuda")

    @torch.no_grad()
    def forward(
        self,
        input_ids_BS: Tensor,
        position_ids_BS: Tensor,
        document_ids_BS: Tensor | None,
        names: Sequence[str],
        row_numbers_B: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Embeddings and rotations of the tokens, and the stored tensors of the rows with these numbers.

        Raises ValueError as prefetch.
        """
        if row_numbers_B is None:
            raise ValueError("row_numbers: must be given where the target's states are stored")
        numbers = tuple(row_numbers_B.tolist())
        encoded = self._ahead.pop(numbers, None) or self._read(numbers)
        device, dtype = self.head_weight.device, self.head_weight.dtype
        encoded = {name: tensor.to(device, non_blocking=True) for name, tensor in encoded.items()}
        source = self.held_out if numbers[0] < 0 else self.rows
        assert source is not None
        return self.inputs(input_ids_BS, position_ids_BS) | decode(encoded, source.declaration.tensors, dtype)
