"""Whether the partition that a rule's jobs are sent to has nodes as the profile asks for, by what Slurm says of them."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from longspec import slurm

# In Slurm's words: gpu:8, gpu:h100:8, gpu:h100:8(S:0-1); more than one, with commas between them.
GPU = re.compile(r"\bgpu(?::([^:,(]*[^:,(\d][^:,(]*))?(?::(\d+))?")
FILE = "profiles/slurm/profile.yaml"


@dataclass(frozen=True)
class Node:
    """A node's GPUs as Slurm writes them, and its memory in MB."""

    gres: str
    memory: int

    def has(self, gres: str, memory: int) -> bool:
        """Whether a job of so many GPUs, of a type if it names one, and of so much memory finds room on the empty node."""
        wanted = GPU.search(gres)
        kind, count = (wanted[1], int(wanted[2] or 1)) if wanted else (None, 0)
        found = [(each[1], int(each[2] or 1)) for each in GPU.finditer(self.gres)]
        there = sum(number for name, number in found if kind is None or (name or "").lower() == kind.lower())
        return there >= count and self.memory >= memory

    def __str__(self) -> str:
        return f"{self.gres}, {self.memory} MB"


def check_nodes(rule: str, block: Mapping[str, str], answer_of: Callable[[list[str]], str] = slurm.answer_of) -> None:
    """Raise ValueError, with the numbers, where the partition of a rule's jobs has too few nodes with such GPUs and memory.

    block: the profile's set-resources of the rule. Where Slurm gives no answer nothing is judged: it will refuse the job.
    """
    partition = block.get("slurm_partition", "").strip("'\"")
    if not partition:
        return
    try:
        told = answer_of(["sinfo", "--noheader", "--Node", f"--partition={partition}", "--format=%n|%G|%m"])
    except slurm.NoAnswerError:
        return
    found = [line.strip().split("|") for line in told.splitlines()]
    known = [fields for fields in found if len(fields) == 3 and fields[2].rstrip("+").isdecimal()]
    nodes = {name: Node(gres, int(memory.rstrip("+"))) for name, gres, memory in known}
    gres, memory = block.get("gres", "").strip("'\""), block.get("mem_mb") or block.get("node_mem") or "0"
    wanted = int(memory) if memory.isdecimal() else 0
    number = int(block.get("nodes", 1))
    fitting = [node for node in nodes.values() if node.has(gres, wanted)]
    if nodes and len(fitting) < number:
        kinds = sorted({str(node) for node in nodes.values()})
        raise ValueError(
            f"set-resources: {rule}: a job asks for {number} node(s) with {gres or 'no GPU'} and {wanted} MB each; of the "
            f"{len(nodes)} of partition {partition} {len(fitting)} have that. They have: {'; '.join(kinds)}. Change gres, "
            f"the memory, nodes or slurm_partition in {FILE}"
        )
