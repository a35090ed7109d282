"""What a rule's jobs ask for is held against the nodes of their partition, as sinfo tells of them."""

import re

import pytest

from longspec.slurm import NoAnswerError
from longspec.workflow.jobs.resources import Node, check_nodes

BLOCK = {"slurm_partition": "gpu", "nodes": "2", "gres": "'gpu:h100:8'", "ranks": "8", "node_mem": "900000"}
SINFO = "a1|gpu:h100:8(S:0-1)|1031000\na2|gpu:h100:8|1031000+\nb1|gpu:a100:4,nvme:1|515000\n"


@pytest.mark.parametrize(
    ("node", "gres", "memory", "has"),
    [
        (Node("gpu:h100:8(S:0-1)", 1000), "gpu:8", 1000, True),
        (Node("gpu:h100:8(S:0-1)", 1000), "gpu:H100:8", 1000, True),
        (Node("gpu:h100:8(S:0-1)", 1000), "gpu:a100:1", 1000, False),
        (Node("gpu:h100:8(S:0-1)", 1000), "gpu:8", 1001, False),
        (Node("gpu:a100:4,gpu:a40:4", 1000), "gpu:8", 0, True),
        (Node("gpu:a100:4,gpu:a40:4", 1000), "gpu:a100:8", 0, False),
        (Node("gpu:8", 1000), "gpu", 0, True),
        (Node("gpu:a100_80gb:8", 1000), "gpu:a100_80gb:2", 0, True),
        (Node("(null)", 1000), "gpu:1", 0, False),
        (Node("(null)", 1000), "", 1000, True),
    ],
)
def test_a_node_has_the_gpus_and_the_memory_or_not(node: Node, gres: str, memory: int, has: bool) -> None:
    assert node.has(gres, memory) is has


@pytest.mark.parametrize(
    ("change", "asked"),
    [
        ({"gres": "gpu:b200:8"}, "2 node(s) with gpu:b200:8 and 900000 MB each; of the 3 of partition gpu 0 have that"),
        ({"gres": "gpu:h100:9"}, "with gpu:h100:9 and"),
        ({"node_mem": "1031001"}, "with gpu:h100:8 and 1031001 MB each; of the 3 of partition gpu 0 have that"),
        ({"mem_mb": "1031001"}, "1031001 MB each"),
        ({"nodes": "3"}, "3 node(s) with gpu:h100:8 and 900000 MB each; of the 3 of partition gpu 2 have that"),
    ],
)
def test_what_no_partition_can_give_is_refused_with_the_numbers(change: dict[str, str], asked: str) -> None:
    questions = []

    def sinfo(command: list[str]) -> str:
        questions.append(command)
        return SINFO

    check_nodes("train", BLOCK, sinfo)
    assert "--partition=gpu" in questions[0]
    with pytest.raises(ValueError, match=re.escape(asked)) as refused:
        check_nodes("evaluate", BLOCK | change, sinfo)
    assert str(refused.value).startswith("set-resources: evaluate: a job asks for ")
    assert "They have: gpu:a100:4,nvme:1, 515000 MB; gpu:h100:8" in str(refused.value)


@pytest.mark.parametrize("said", ["", "slurm_load_partitions: something\n", None])
def test_where_slurm_says_nothing_of_its_nodes_nothing_is_judged(said: str | None) -> None:
    def sinfo(command: list[str]) -> str:
        if said is None:
            raise NoAnswerError("there is no sinfo on the PATH")
        return said

    check_nodes("train", BLOCK, sinfo)
    check_nodes("raw", {}, sinfo)
