"""How large a tensor an operation makes."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        sizes = (x.untyped_storage().nbytes() // x.element_size() for x in tree_leaves(made) if isinstance(x, torch.Tensor))
        self.elements = max(self.elements, *sizes, 0)
        return made
