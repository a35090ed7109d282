"""One linear layer on the target's final hidden state, which says the token after the next one.

Shapes: B rows, S tokens, N trained tokens, H hidden width.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from longspec.methods import settings_of
from longspec.methods.contract import DraftMemory, DraftOutput, DraftTrainer, Method
from longspec.methods.draft_files import stored_settings
from longspec.models.losses import NO_LABEL, linear_cross_entropy, loss_bytes
from longspec.models.teachers import DenseTeacher
from longspec.states.tensors import FINAL


class MadeUpLayer(nn.Module):
    """From the hidden state that says the next token to one that says the token after it."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.ahead = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        nn.init.eye_(self.ahead.weight)

    def forward(self, final_BH: Tensor) -> Tensor:
        """For the target's head, of the same shape."""
        return self.ahead(final_BH)


class MadeUpTrainer(DraftTrainer):
    """The layer beside a frozen target."""

    def __init__(self, states: Any, layer: MadeUpLayer, labels: str) -> None:
        super().__init__(states, layer)
        self.labels = labels

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        row_numbers: Tensor | None = None,
        num_labels: int | None = None,
        with_llm_loss: bool = True,
        steps: int | None = None,
    ) -> DraftOutput:
        """Loss of the tokens two places on; `steps`: as many losses, of which there is one."""
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        final_BSH = self.states(input_ids, position_ids, document_ids, [FINAL], row_numbers)[FINAL]
        labels_BS = labels[:, 2:]
        if document_ids is not None:
            labels_BS = labels_BS.masked_fill(document_ids[:, 2:] != document_ids[:, :-2], NO_LABEL)
        trained_BS = labels_BS != NO_LABEL
        labels_N = labels_BS[trained_BS]
        hidden_NH, teacher_NH = self.draft_model(final_BSH[:, :-2][trained_BS]), final_BSH[:, 1:-1][trained_BS]
        with self.states.gather([self.states.head_weight]):
            teacher = DenseTeacher(teacher_NH, self.states.head_weight, labels_N, None, with_loss=True)
            draft, target, agreements = linear_cross_entropy(hidden_NH, teacher, self.states.head_weight, labels_N, self.labels)
        assert target is not None
        assert agreements is not None
        count = max(1, len(labels_N))
        found = (draft / (count if num_labels is None else num_labels), target / count, agreements / count)
        loss, llm_loss, agreement = found if steps is None else (value[None] for value in found)
        counts = {"labels_two_ahead": (labels_BS != NO_LABEL).sum()}
        return DraftOutput(loss, llm_loss if with_llm_loss else None, agreement, counts)


class MadeUpMethod(Method):
    """The contract's answers (methods/contract.py)."""

    name = "made_up"

    def reads(self, config: Any, settings: Any, *, with_llm_loss: bool) -> tuple[str, ...]:
        """The final hidden states."""
        return (FINAL,)

    def learnt(self, settings: Any) -> None:
        """The final hidden states are the draft's input too."""
        return

    def layer(self, config: Any, settings: Any) -> MadeUpLayer:
        """One product."""
        return MadeUpLayer(config)

    def trainer(self, states: Any, settings: Any, weights: Path | None) -> MadeUpTrainer:
        """Beside the target; a fresh layer is the identity, which says the next token once more."""
        layer = MadeUpLayer(states.config).to(states.head_weight.dtype)
        if weights is not None:
            self.load(layer, weights, states.config, settings)
        return MadeUpTrainer(states, layer, settings.labels)

    def drafted_steps(self, settings: Any) -> int:
        """One token."""
        return 1

    def each_step(self, settings: Any) -> dict[str, Any]:
        """Its one loss."""
        return {"steps": 1}

    def memory(
        self, config: Any, settings: Any, tokens: int, dtype: torch.dtype, device: torch.device, *, top_k: int | None = None
    ) -> DraftMemory:
        """The product's input and output and their gradients; the trained tokens of both models and a chunk of logits."""
        width = config.hidden_size * dtype.itemsize * tokens
        return DraftMemory(kept=2 * width, losses=loss_bytes(config.vocab_size, tokens, device) + 3 * width, backward=width)

    def operations(
        self, config: Any, settings: Any, tokens: int, documents: Iterable[int], labels: int, *, with_teacher: bool
    ) -> tuple[float, float]:
        """The product and its weight's gradient; the draft's logits, their gradient, and the target's logits."""
        hidden = config.hidden_size
        return 2 * 2.0 * labels * hidden * hidden, 3 * 2.0 * labels * hidden * config.vocab_size

    def config_fields(self, config: Any, settings: Any) -> dict[str, Any]:
        """As an engine would look for them."""
        return {"architectures": ["MadeUpForCausalLM"], "hidden_size": config.hidden_size}

    def stored_settings(self, path: Path) -> Any:
        """As a draft folder holds them; weights alone were trained by the default."""
        schema = settings_of(self.name).Draft
        return stored_settings(path, schema) or schema()


METHOD = MadeUpMethod()
