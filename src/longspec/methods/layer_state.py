"""A draft layer's tensors, held against those of a file or a checkpoint."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from longspec.shown import one_line

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_state(
    layer: nn.Module, found: dict[str, Tensor], source: object, unused: Mapping[str, Tensor] | None = None, hint: str = ""
) -> None:
    """Raise ValueError that names each missing, unknown or misshapen tensor, and those whose numbers are no weights.

    layer: may hold no numbers; unused: further names that may be there, each with a tensor of its shape, whatever their
    numbers; hint: what else may be at fault.
    """
    own, unused = layer.state_dict(), unused or {}
    faults = [f"{name}: missing" for name in own.keys() - found.keys()]
    for name, tensor in found.items():
        wanted = own.get(name, unused.get(name))
        if wanted is None:
            faults.append(f"{name}: unknown")
        elif tensor.shape != wanted.shape:
            faults.append(f"{name}: is {list(tensor.shape)}, this target's draft has {list(wanted.shape)}")
        elif tensor.dtype not in DTYPES:
            faults.append(f"{name}: is {tensor.dtype}, weights are {', '.join(map(str, DTYPES))}")
        elif name in own and (strange := int(tensor.isfinite().logical_not().sum())):
            faults.append(f"{name}: {strange} of its {tensor.numel()} numbers are NaN or infinite")
    if faults:
        raise ValueError(one_line(f"{source}: not the weights of this draft: {'; '.join(sorted(faults))}{hint}"))
