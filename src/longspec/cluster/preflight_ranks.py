"""Shared parts of the preflight checks: findings, this rank's place among those that came, and facts that ranks exchange.

Ranks talk through a key-value store alone, which works also where a collective does not.
"""

import json
import os
import platform
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch.distributed import PrefixStore, TCPStore

from longspec.atomic_files import read_json
from longspec.distributed import Ranks
from longspec.families import check_target
from longspec.models.target import read_target_config
from longspec.train.estimate.memory_check import memory_of

OK, WARN, FAIL = "ok", "warn", "fail"
POLL = 0.05  # seconds
NAMED = 8  # of more ranks the others are counted
NETWORK = "NCCL_DEBUG=INFO tells the way that is taken; name the network with NCCL_SOCKET_IFNAME (GLOO_SOCKET_IFNAME on CPUs)"
VERSIONS_OF = ("longspec", "torch", "transformers", "deepspeed", "tokenizers", "numpy", "flash-attn", "liger-kernel")


@dataclass(frozen=True)
class Finding:
    """The result of one check, and how to fix what is wrong."""

    level: str
    found: str
    fix: str = ""


class UnreadableTargetError(ValueError):
    """The target's configuration cannot be used, which the check of the target reports."""


@dataclass(frozen=True)
class Facts:
    """Facts about a rank that all others get; memory in bytes."""

    host: str
    versions: dict[str, str]
    gpus: int  # that it sees
    gpu: str = ""  # the name of its own
    memory: int = 0
    free: int = 0
    host_memory: int = 0


@dataclass
class Place:
    """This rank, the ranks that came, and what the job to come is made of."""

    ranks: Ranks
    seconds: float  # the longest wait for other ranks, and for one check
    recipes: list[Any]
    runtimes: list[Any]
    target: Path
    tokenizer: Path
    out: Path
    gpus_expected: int = 0
    store: Any = None
    facts: dict[int, Facts] = field(default_factory=dict)  # of the ranks that came
    gone: set[int] = field(default_factory=set)  # ranks that came, and told nothing in a check

    @property
    def stages(self) -> list[tuple[Any, Any]]:
        """Recipe and runtime of each stage."""
        return list(zip(self.recipes, self.runtimes, strict=True))

    @property
    def missing(self) -> list[int]:
        """The ranks that did not come, or are gone."""
        return [rank for rank in range(self.ranks.world_size) if rank not in self.facts or rank in self.gone]

    @property
    def neighbours(self) -> list[int]:
        """The ranks on this one's node, itself among them."""
        here = self.facts[self.ranks.rank].host
        return [rank for rank, facts in self.facts.items() if facts.host == here]

    @property
    def is_first_of_node(self) -> bool:
        """Whether this rank checks what is the same for its whole node."""
        return self.ranks.rank == min(self.neighbours)

    @property
    def device(self) -> torch.device:
        """Where this rank would train."""
        return torch.device("cuda", self.ranks.local_rank) if torch.cuda.is_available() else torch.device("cpu")

    @cached_property
    def config(self) -> Any:
        """The target's configuration. Raises UnreadableTargetError."""
        try:
            path = read_json(self.target)["path"]
            config = read_target_config(path)
            check_target(config, f"{path}/config.json")
        except Exception as error:  # whatever transformers raises for what it does not know
            raise UnreadableTargetError("not checked: needs the target's config.json, see the check of the target") from error
        return config

    def names(self, ranks: Iterable[int]) -> str:
        """Names of ranks with their nodes, as far as these are known."""
        listed = list(ranks)
        told = [f"rank {rank}" + (f" ({self.facts[rank].host})" if rank in self.facts else "") for rank in listed[:NAMED]]
        return ", ".join(told) + (f" and {len(listed) - NAMED} more" if len(listed) > NAMED else "")

    def tell(self, key: str, content: Any) -> None:
        """Put content under a key of the store, for the other ranks."""
        self.store.set(f"{key}/{self.ranks.rank}", json.dumps(content))

    def hear(self, key: str, ranks: Iterable[int], seconds: float) -> dict[int, Any]:
        """The contents that these ranks have put under a key; ranks that put none for so many seconds are left out."""
        waiting, heard, until = list(ranks), {}, time.monotonic() + seconds
        while True:
            for rank in list(waiting):
                if self.store.check([f"{key}/{rank}"]):
                    heard[rank] = json.loads(self.store.get(f"{key}/{rank}"))
                    waiting.remove(rank)
            if not waiting or time.monotonic() > until:
                return heard
            time.sleep(POLL)


def open_store(ranks: Ranks, seconds: float) -> Any:
    """The store of the job's ranks, kept by the launcher or rank 0; unlike torch's own rendezvous it waits for nobody else."""
    by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=ranks.is_main and not by_launcher,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
        multi_tenant=True,  # under a launcher the process group's store will have the same port
    )
    return PrefixStore("preflight", store)


def meet(place: Place) -> None:
    """Wait for all ranks, and learn the facts of those that came."""
    place.store = open_store(place.ranks, place.seconds)
    place.tell("facts", asdict(own_facts(place.ranks)))
    told = place.hear("facts", range(place.ranks.world_size), place.seconds)
    place.facts = {rank: Facts(**facts) for rank, facts in sorted(told.items())}


def installed(package: str) -> str:
    """A package's version."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def own_facts(ranks: Ranks) -> Facts:
    """This rank's facts."""
    versions = {"python": platform.python_version()} | {package: installed(package) for package in VERSIONS_OF}
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = Facts(socket.gethostname(), versions, gpus, host_memory=host_memory())
    if ranks.local_rank >= gpus:
        return found
    free, total = torch.cuda.mem_get_info(ranks.local_rank)
    return replace(found, gpu=torch.cuda.get_device_name(ranks.local_rank), memory=total, free=free)


def host_memory() -> int:
    """Bytes of main memory that this job may take on its node: all, or what Slurm or a control group leaves it."""
    limits = [memory_of(torch.device("cpu"))]
    if "SLURM_MEM_PER_NODE" in os.environ:
        limits.append(int(os.environ["SLURM_MEM_PER_NODE"]) * 2**20 or limits[0])  # 0: all of the node
    with suppress(OSError, IndexError):
        group = Path("/sys/fs/cgroup", Path("/proc/self/cgroup").read_text().split("0::/")[1].split("\n")[0])
        for folder in (group, *group.parents):
            with suppress(OSError, ValueError):  # no such file, or "max"
                limits.append(int((folder / "memory.max").read_text()))
    return min(limits)
