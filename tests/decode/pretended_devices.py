"""Devices that a test pretends to have: their tensors lie in main memory, and no operation takes those of two devices together.

A tensor on one says so as a tensor on a GPU does, and what a GPU refuses is refused here: operands on different devices, but
for a number from main memory and for indices there. Within `pretended_devices` targets may be put on FIRST and SECOND.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

KIND = "privateuseone"  # torch's name for devices that a package of someone else's brings
FIRST, SECOND = (torch.device(KIND, number) for number in (0, 1))
MAIN_MEMORY = torch.device("cpu")
aten = torch.ops.aten
BETWEEN_DEVICES = {aten._to_copy.default, aten.copy_.default}
WITH_INDICES = {aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default}


class OnDevice(Tensor):
    """A tensor that says it is on a device, around the one in main memory that has its numbers."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor, device: torch.device) -> "OnDevice":
        layout = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        made = Tensor._make_wrapper_subclass(cls, held.size(), **layout, device=device)
        made.held = held
        return made

    def tolist(self) -> Any:
        """Its numbers on the host, which torch gives of no class of someone else's."""
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func}: outside of pretended_devices")


class _Devices(TorchDispatchMode):
    """Runs each operation in main memory, on the device of its operands as far as anybody is told."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:  # in inference mode operations that are made of others come here whole
                return func.decompose(*args, **kwargs)
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        free = tree_leaves(args[1]) if func in WITH_INDICES else []  # to come from main memory
        devices = {x.device for x in given if isinstance(x, OnDevice) or (x.ndim and not any(x is each for each in free))}
        if len(devices) > 1 and func not in BETWEEN_DEVICES:
            raise RuntimeError(f"{func}: tensors on {' and '.join(sorted(map(str, devices)))}")
        place = torch.device(kwargs.get("device") or next(iter(devices), MAIN_MEMORY))
        if func is aten.copy_.default:
            place = args[0].device
        if "device" in kwargs:
            kwargs["device"] = MAIN_MEMORY
        known = {id(x.held): x for x in given if isinstance(x, OnDevice)}
        made = func(*tree_map(_held, args), **tree_map(_held, kwargs))
        return tree_map(lambda x: _told(x, place, known), made)


def _held(x: Any) -> Any:
    return x.held if isinstance(x, OnDevice) else x


def _told(x: Any, place: torch.device, known: dict[int, OnDevice]) -> Any:
    """A result as the caller gets it: an operand that was written to is the operand that was given."""
    if id(x) in known:
        return known[id(x)]
    return OnDevice(x, place) if isinstance(x, Tensor) and place.type == KIND else x


class _NoAccelerator(backend_registration._DummyPrivateUse1Hook):
    """Whoever asks this process for an accelerator is told that there is none."""

    def is_available(self) -> bool:
        return False


@cache
def _register() -> None:
    """Once in a process, which forgets no device."""
    backend_registration._setup_privateuseone_for_python_backend(hook=_NoAccelerator())


@contextmanager
def pretended_devices() -> Iterator[None]:
    """Within the block FIRST and SECOND take tensors."""
    _register()
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor makes them in main memory, and sends them on
    try:
        with _Devices():
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(False)
