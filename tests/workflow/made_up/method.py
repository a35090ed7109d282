"""One linear layer on the target's final hidden state, which says the token after the next one.

Shapes: B rows, S tokens, T tokens of the longest prompt, E tokens of a path, N trained tokens, H hidden width, V vocabulary.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from longspec.decode.drafters import Drafter, DraftInput
from longspec.decode.levels import Levels
from longspec.decode.sampling import Sampler
from longspec.decode.tree import DraftTree, TreeBuilder, draft_to_target_of
from longspec.draft_vocabulary import DraftVocabulary
from longspec.methods import settings_of
from longspec.methods.contract import DraftMemory, DraftOperations, DraftOutput, DraftTrainer
from longspec.methods.draft_files import check_draft_config, draft_weights_file, stored_settings
from longspec.methods.layer_state import check_state
from longspec.models.inputs import NO_LABEL
from longspec.models.losses import linear_cross_entropy, loss_bytes
from longspec.models.weight_files import read_tensors
from longspec.states.tensors import FINAL, StateTensor, final_hidden_states


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
            sums = linear_cross_entropy(hidden_NH, teacher_NH, self.states.head_weight, labels_N, self.labels)
        assert sums.target is not None
        assert sums.agreements is not None
        count = max(1, len(labels_N))
        found = (sums.draft / (count if num_labels is None else num_labels), sums.target / count, sums.agreements / count)
        loss, llm_loss, agreement = found if steps is None else (value[None] for value in found)
        counts = {"labels_two_ahead": (labels_BS != NO_LABEL).sum()}
        return DraftOutput(loss, llm_loss if with_llm_loss else None, agreement, counts)


class MadeUpDrafter(Drafter):
    """One level of drafted tokens, of which the state before the root says which are likely."""

    reads = (FINAL,)

    def __init__(self, target: Any, layer: nn.Module, vocabulary: DraftVocabulary | None = None) -> None:
        self.target, self.layer, self.draft_to_target = target, layer, draft_to_target_of(vocabulary, target.device)
        self.proposed = None if vocabulary is None else len(vocabulary.ids)
        self.newest_BH = torch.empty(0)  # of the token before the root

    def check(self, target: Any) -> None:
        """Raise ValueError for another target than its own."""
        if target is not self.target:
            raise ValueError("draft: this drafter was made for another target; make one for this target")

    def begin(self, prompts: list[list[int]], hidden: dict[str, Tensor]) -> None:
        """The last token of each prompt."""
        final_BTH = hidden[FINAL]
        last_B = torch.tensor([len(prompt) - 1 for prompt in prompts], device=final_BTH.device)
        self.newest_BH = final_BTH[torch.arange(len(prompts), device=final_BTH.device), last_B]

    def propose(self, draft_input: DraftInput, levels: Levels, sampler: Sampler) -> DraftTree:
        """The first of the levels."""
        logits_BV = self.target.lm_head(self.layer(self.newest_BH))
        logits_BV = logits_BV if self.draft_to_target is None else logits_BV[:, self.draft_to_target.ids_V]
        growth = TreeBuilder(draft_input.roots_B, self.draft_to_target)
        growth.grow_all(levels[:1], sampler, lambda: logits_BV[:, None])
        return growth.tree()

    def commit(self, tokens_BE: Tensor, kept_B: Tensor, hidden: dict[str, Tensor]) -> None:
        """The last token that became text."""
        self.newest_BH = hidden[FINAL][torch.arange(len(kept_B), device=kept_B.device), kept_B]

    def select(self, rows_B: Tensor) -> None:
        """Go on with these rows alone."""
        self.newest_BH = self.newest_BH[rows_B]


class MadeUpMethod:
    """The contract's answers (methods/contract.py)."""

    name = "made_up"

    def reads(self, config: Any, settings: Any, *, with_llm_loss: bool) -> tuple[StateTensor, ...]:
        """The final hidden states."""
        return (final_hidden_states(config),)

    def learnt(self, settings: Any) -> None:
        """The final hidden states are the draft's input too."""
        return

    def layer(self, config: Any, settings: Any) -> MadeUpLayer:
        """One product."""
        return MadeUpLayer(config)

    def fresh_layer(self, states: Any, settings: Any) -> MadeUpLayer:
        """The identity: the next token is said once more."""
        return MadeUpLayer(states.config).to(states.head_weight.dtype)

    def trainer(self, states: Any, settings: Any, weights: Path | None) -> MadeUpTrainer:
        """Beside the target."""
        layer = self.fresh_layer(states, settings)
        if weights is not None:
            self.load(layer, weights)
        return MadeUpTrainer(states, layer, settings.labels)

    def draws(
        self, settings: Any, seed: int, step: int, rows: Sequence[tuple[int, np.ndarray]], target_positions: int
    ) -> tuple[list[np.ndarray], dict[str, Any]]:
        """Plain positions; nothing is drawn."""
        return [plain_S for _, plain_S in rows], {}

    def drafted_steps(self, settings: Any) -> int:
        """One token."""
        return 1

    def each_step(self, settings: Any) -> dict[str, Any]:
        """Its one loss."""
        return {"steps": 1}

    def heaviest(self, settings: Any) -> dict[str, Any]:
        """All forwards weigh the same."""
        return {}

    def memory(
        self, config: Any, settings: Any, tokens: int, dtype: torch.dtype, device: torch.device, *, top_k: int | None = None
    ) -> DraftMemory:
        """The product's input and output and their gradients; the trained tokens of both models and a chunk of logits."""
        width = config.hidden_size * dtype.itemsize * tokens
        return DraftMemory(kept=2 * width, losses=loss_bytes(config.vocab_size, tokens, device) + 3 * width, backward=width)

    def operations(
        self,
        config: Any,
        settings: Any,
        tokens: int,
        documents: Iterable[int],
        labels: int,
        *,
        with_llm_loss: bool,
        top_k: int | None = None,
    ) -> DraftOperations:
        """The product and its weight's gradient; the draft's logits, their gradient, and the target's logits."""
        hidden = config.hidden_size
        return DraftOperations(draft=2 * 2.0 * labels * hidden * hidden, head=3 * 2.0 * labels * hidden * config.vocab_size)

    def published(self, state: dict[str, Tensor], settings: Any) -> dict[str, Tensor]:
        """By the names that it is trained with."""
        return state

    def config_fields(self, config: Any, settings: Any) -> dict[str, Any]:
        """As an engine would look for them."""
        return {"architectures": ["MadeUpForCausalLM"], "hidden_size": config.hidden_size}

    def check_state(self, layer: nn.Module, state: dict[str, Tensor], source: object) -> None:
        """Exactly the layer's tensors."""
        check_state(layer, state, source)

    def check_same(self, path: Path, config: Any, settings: Any) -> None:
        """What labels it was trained on is no matter here."""
        check_draft_config(path, config)

    def load(self, layer: nn.Module, path: Path) -> None:
        """From a draft folder or a weight file."""
        file = draft_weights_file(path)
        state = read_tensors(file)
        self.check_state(layer, state, file)
        layer.load_state_dict(state)

    def stored_settings(self, path: Path) -> Any:
        """As a draft folder holds them; weights alone were trained by the default."""
        schema = settings_of(self.name).Draft
        return stored_settings(path, schema) or schema()

    def drafter(self, target: Any, layer: nn.Module, settings: Any, vocabulary: DraftVocabulary | None = None) -> MadeUpDrafter:
        """Chains of one token."""
        return MadeUpDrafter(target, layer, vocabulary)


METHOD = MadeUpMethod()
