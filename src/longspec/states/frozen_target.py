"""The parts of a frozen target outside its layers: a draft reads them whether the layers' states are computed or stored.

Shapes: B batch, S tokens of a row, R rotary width, V vocabulary, H hidden width.
"""

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from longspec.models.draft_attention import rotations
from longspec.models.tensor_parallel import whole
from longspec.states.tensors import COS, EMBEDDED, SIN


class FrozenTarget(nn.Module):
    """A target with its embeddings, rotations, final norm and head. Their weights are whole within `gather` of a subclass.

    target: transformers' causal language model, with or without layers.
    """

    def __init__(self, target: Any) -> None:
        super().__init__()
        self.target = target
        self._whole_heads: list[nn.Parameter] = []  # out of reach of what moves and counts a module's parameters

    @property
    def head_weight(self) -> nn.Parameter:
        """The weight [V, H] of the head. Where it is split over ranks they all ask for it; its whole is made once and kept."""
        weight: nn.Parameter = self.target.lm_head.weight
        if not isinstance(weight, DTensor):
            return weight
        if not self._whole_heads:
            self._whole_heads.append(nn.Parameter(whole(weight), requires_grad=False))
        return self._whole_heads[0]

    @property
    def final_norm_weight(self) -> nn.Parameter:
        """The weight [H] of the norm before the head."""
        return self.target.model.norm.weight

    def inputs(self, input_ids_BS: Tensor, position_ids_BS: Tensor) -> dict[str, Tensor]:
        """Embeddings [B, S, H], and rotations [B, S, R], of the tokens at these positions."""
        embedded_BSH = self.target.model.embed_tokens(input_ids_BS)
        cos_BSR, sin_BSR = rotations(self.target.model, embedded_BSH, position_ids_BS)
        return {EMBEDDED: embedded_BSH, COS: cos_BSR, SIN: sin_BSR}
