"""No file of a user runs code: where files are opened that could."""

import ast
from functools import cache
from pathlib import Path

DOOR = "models/weight_files.py"  # the one place where weights are opened
STATES = {"states/build.py", "states/load.py"}  # which open files that a job of the workflow has made
SAFETENSORS = {"measure/engines/openvino_ir.py"}  # which runs where this package's modules are missing
LOADERS = {"torch.load", "safe_open", "load_file", "pickle.load", "pickle.loads", "torch.jit.load"}
# transformers asks on the terminal whether to run a folder's code unless it is told not to.
ASKING = ("AutoConfig", "AutoTokenizer", "AutoModel", "AutoModelForCausalLM")


@cache
def calls(root: Path) -> list[tuple[str, str, ast.Call]]:
    """Every call in src: file, what is called, the call."""
    source = root / "src/longspec"
    return [
        (str(path.relative_to(source)), ast.unparse(node.func), node)
        for path in source.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
    ]


def test_weights_are_opened_by_one_module(root: Path) -> None:
    assert {file for file, name, _ in calls(root) if name in LOADERS} == {DOOR, *STATES, *SAFETENSORS}
    assert {name for file, name, _ in calls(root) if name in LOADERS and file in SAFETENSORS} == {"load_file"}
    assert {name for file, name, _ in calls(root) if name in LOADERS and file in STATES} == {"safe_open"}


def test_transformers_is_told_everywhere_to_run_nothing(root: Path) -> None:
    found = [(file, node) for file, name, node in calls(root) if name in [f"{cls}.from_pretrained" for cls in ASKING]]
    assert len(found) >= 4
    for file, node in found:
        told = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        assert told.get("trust_remote_code") == "False", f"{file}: line {node.lineno}"


def test_a_targets_configuration_has_one_reader(root: Path) -> None:
    """It holds the family against the supported ones before transformers looks for a class."""
    assert {file for file, name, _ in calls(root) if name == "AutoConfig.from_pretrained"} == {"models/target_config.py"}
