"""The engine's program for OpenVINO with trees in place of chains: a stand-in for its interpreter, of real_llm_engines.py.

OpenVINO grows a tree of `tree_depth` levels from the `branching_factor` likeliest tokens of each node, and verifies the
`num_assistant_tokens` likeliest of its nodes: 16, as many as our tree of [4, 6, 6].
"""

import sys
from typing import Any

from longspec.measure.engines import openvino, protocol

BRANCHES, DEPTH, NODES = 4, 3, 16
chain = openvino._settings


def tree(engine: openvino.Engine, request: protocol.Request) -> Any:
    """Return the settings of a request, with a tree if it drafts."""
    settings = chain(engine, request)
    if engine.tokens:
        settings.branching_factor, settings.tree_depth, settings.num_assistant_tokens = BRANCHES, DEPTH, NODES
    return settings


if __name__ == "__main__":
    openvino._settings = tree
    sys.argv[1:3] = []  # -m and the module's name
    protocol.run(("openvino_genai", "openvino", "optimum", "transformers", "torch"), openvino.load, openvino.answer)
