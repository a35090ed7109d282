"""A draft's own head, whose weight engines may have whole within its forward alone."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

# The head's weight and hidden states -> a tuple of tensors, such as losses.
Take = Callable[[Tensor, Any], Any]


class DraftHead(nn.Linear):
    """The draft's own head. Its weight may be whole within its forward alone, so losses over the weight are taken there."""

    def forward(self, hidden: Any, take: Take | None = None) -> Any:
        """Logits of hidden states [..., H]; or what `take` makes of the weight and of hidden states."""
        return super().forward(hidden) if take is None else take(self.weight, hidden)
