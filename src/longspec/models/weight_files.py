"""Read files of weights, .safetensors or written by torch.save. Only this module opens any.

Reading runs no code: it returns tensors, or raises ValueError with one line: the file, what is wrong and what to do.
"""

import errno
import os
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from longspec.models.model_folder import INDEX, read_weight_map, weight_files
from longspec.shown import brief, one_line

SAFETENSORS_SUFFIX = ".safetensors"
TENSORS_ALONE = "save its tensors alone: torch.save(model.state_dict(), file), or as .safetensors"
WANTED = re.compile(r"GLOBAL (\S+)")  # how torch's error names a class that a pickle needs
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # allowed for weights


@contextmanager
def telling_damage(path: Path, wrong: str = "is damaged or no file of weights") -> Iterator[None]:
    """Raise ValueError, with the path, for any error that a library raises on the file's bytes.

    MemoryError passes unchanged: it says nothing about the file.
    """
    try:
        yield
    except (MemoryError, pickle.UnpicklingError):  # _read_pickle handles UnpicklingError: a file that needs more than tensors
        raise
    except Exception as error:
        told = f"{type(error).__name__}: {brief(error)}"
        if os.strerror(errno.ENOMEM) in str(error):
            raise ValueError(f"{path}: no memory is left to map it ({told}); raise the limit, such as ulimit -v") from error
        raise ValueError(f"{path}: {wrong} ({told}); save, copy or download it again") from error


def check_file(path: Path) -> None:
    """Raise ValueError if there is no file, or an empty one."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file; correct the path, or copy or download it again")
    if path.stat().st_size == 0:
        raise ValueError(f"{path}: is empty; save, copy or download it again")


def open_safetensors(path: Path) -> Any:
    """Return an open .safetensors file, safetensors' own object. Raises ValueError if its header or length is wrong."""
    check_file(path)
    with telling_damage(path):
        return safe_open(path, framework="pt")


def _read_pickle(path: Path) -> dict[str, Tensor]:
    """Return the state dict of a torch.save file, on the CPU; in the zip format tensors are read from disk only when used."""
    check_file(path)
    try:
        with telling_damage(path):
            content = torch.load(path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=True)
    except pickle.UnpicklingError as error:
        wanted = WANTED.search(str(error))  # random bytes may look like a class name too
        reason = f"wants {wanted[1]}" if wanted else brief(error)
        raise ValueError(f"{path}: holds more than tensors, or is damaged ({reason}); {TENSORS_ALONE}") from error
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) and value.layout is torch.strided and value.device.type == "cpu"
        for name, value in content.items()
    ):
        raise ValueError(f"{path}: not a state dict of tensors by name; {TENSORS_ALONE}")
    return content


def read_tensors(path: Path, wanted: Callable[[str], bool] = lambda _: True) -> dict[str, Tensor]:
    """Return the wanted tensors of a state dict; only these are read. Raises ValueError for a torn or any other file."""
    if path.suffix != SAFETENSORS_SUFFIX:  # cloned: otherwise tensors stay mapped to the file, which may be replaced
        return {name: tensor.clone() for name, tensor in _read_pickle(path).items() if wanted(name)}
    with open_safetensors(path) as file, telling_damage(path):
        return {name: file.get_tensor(name) for name in file.keys() if wanted(name)}  # noqa: SIM118


def read_split(index: Path, wanted: Callable[[str], bool] = lambda _: True) -> dict[str, Tensor]:
    """Return the wanted tensors of a state dict in several files. Raises ValueError if one is not where the index says."""
    listed = {name: file for name, file in read_weight_map(index).items() if wanted(name)}
    found: dict[str, Tensor] = {}
    for file in sorted(set(listed.values())):
        read = read_tensors(index.parent / file, wanted)
        found |= {name: tensor for name, tensor in read.items() if listed.get(name, file) == file}
    if missing := sorted(listed.keys() - found.keys()):
        raise ValueError(f"{index}: {', '.join(missing[:3])}: not in the files it lists them for; copy or download them again")
    return found


def read_folder(folder: Path, wanted: Callable[[str], bool] = lambda _: True) -> dict[str, Tensor]:
    """Return the wanted tensors of a model's folder, with weights in one file or in several with an index.

    Raises ValueError as read_tensors, read_split and weight_files do.
    """
    path = folder / weight_files(folder)[-1]
    read = read_split if path.name.endswith(INDEX) else read_tensors
    return read(path, wanted)


def fill(
    layer: nn.Module, found: dict[str, Tensor], source: object, check: Callable[[nn.Module, dict[str, Tensor], object], None]
) -> None:
    """Fill a layer from a state dict read from `source`; the dict may hold more. Raises ValueError as `check` does."""
    check(layer, found, source)
    layer.load_state_dict({name: found[name] for name in layer.state_dict()})


def check_state(
    layer: nn.Module, found: dict[str, Tensor], source: object, unused: Mapping[str, Tensor] | None = None, hint: str = ""
) -> None:
    """Raise ValueError that names each missing, unknown or misshapen tensor, and those with other dtypes, NaN or infinity.

    layer: may be on the meta device; unused: further names allowed in `found`, each with a tensor of its shape; their numbers
    are not checked; hint: what else may be wrong.
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
