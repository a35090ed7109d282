"""On how many ranks a job's target decodes: the fewest that hold it, by an estimate and the profile's memory of a GPU."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from longspec.workflow.jobs.decoding_memory import Decoding, Target, rank_bytes
from longspec.workflow.jobs.resources import GPUS, gpus_in

OF_DECODING = ("gres", "gpu_mem", "ranks")  # keys of set-resources that are read here


@dataclass(frozen=True)
class Machine:
    """The GPUs that a rule's jobs may have.

    rule: its name; gpus: of a node, 0 where the profile tells none; gres: a job's own, as the profile has it, "" for as many as
    there are ranks; node_gres: a whole node's, which tells their type; gpu_mem: MB of each, 0: unknown; ranks: by hand, 0: by
    the estimate.
    """

    rule: str
    gpus: int = 0
    gres: str = ""
    node_gres: str = ""
    gpu_mem: int = 0
    ranks: int = 0

    def asked(self, ranks: int) -> str:
        """The GPUs that a job of so many ranks asks Slurm for; "" where the profile has none."""
        if self.gres or not self.node_gres:
            return self.gres
        named = GPUS.search(self.node_gres)
        words = named[0].split(":") if named else ["gpu"]
        kind = [word for word in words[1:2] if not word.isdigit()]
        return ":".join([words[0], *kind, str(ranks)])


def machine_of(rule: str, block: Mapping[str, str], training: Mapping[str, str]) -> Machine:
    """The machine of a rule by its block of the profile's set-resources, and that of `train`, which has a whole node's GPUs.

    Raises ValueError for a number that is none, and for more ranks than GPUs.
    """
    numbers = {}
    for name in ("gpu_mem", "ranks"):
        text = block.get(name, "0")
        if not text.isdecimal() or (name in block and int(text) < 1):
            raise ValueError(f"set-resources: {rule}: {name}: {text}: must be a whole number, 1 or more")
        numbers[name] = int(text)
    gres, node = (each.get("gres", "").strip("'\"") for each in (block, training))
    found = Machine(rule, gpus_in(gres or node), gres, node, **numbers)
    if 0 < found.gpus < found.ranks:
        of = rule if gres else "train"
        raise ValueError(
            f"set-resources: {rule}: ranks: {found.ranks} processes, one a GPU, but gres of {of}: {gres or node} has "
            f"{found.gpus}; lower ranks, or raise gres"
        )
    return found


def check_whole(rule: str, block: Mapping[str, str]) -> None:
    """Raise ValueError for a profile's block whose place the command line has taken, with a GPU's job in it."""
    if block and block.keys() <= set(OF_DECODING):
        raise ValueError(
            f"--set-resources {rule}:{next(iter(block))}=... takes the place of all that the profile sets, GPUs included. "
            "Change profiles/slurm/profile.yaml instead, or give a folder with another one: --workflow-profile"
        )


def ranks_of(what: str, target: Target | None, decodings: Iterable[Decoding], machine: Machine) -> int:
    """The fewest ranks that hold the target and each of the decodings; one where there is nothing to estimate from.

    what: is decoded, for messages. Raises ValueError, with the numbers, for ranks that cannot share the target's heads, and
    where no number of a node's GPUs holds it.
    """
    if machine.ranks:
        if target is not None and machine.ranks not in target.fitting(machine.ranks):
            raise ValueError(
                f"set-resources: {machine.rule}: ranks: {machine.ranks}: {what}: {target.shared}; give one of "
                f"{', '.join(map(str, target.fitting(target.config.num_attention_heads)))}"
            )
        return machine.ranks
    if target is None or not machine.gpu_mem:
        return 1
    fitting = target.fitting(max(1, machine.gpus))
    needed = {ranks: max(rank_bytes(target, each, ranks) for each in decodings) for ranks in fitting}
    for ranks, size in needed.items():
        if size <= machine.gpu_mem * 10**6:
            return ranks
    sizes = ", ".join(f"{_gb(size)} on each of {ranks}" for ranks, size in needed.items())
    raise ValueError(
        f"{what}: needs {sizes} GPUs, by an estimate; set-resources: {machine.rule}: gpu_mem has "
        f"{_gb(machine.gpu_mem * 10**6)}, a node {max(1, machine.gpus)} of them, and {target.shared}. Shorten the longest "
        f"prompts or answers; or set ranks of {machine.rule} in profiles/slurm/profile.yaml, in the place of the estimate"
    )


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
