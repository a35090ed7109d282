"""Who may import whom, the one door of each heavy library, and where files are opened that could run code."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from longspec import methods

SOURCE = Path(__file__).parents[1] / "src/longspec"
# Modules that lie in no package of ours, and the configuration: everyone may import them.
SHARED = {path.stem for path in SOURCE.glob("[!_]*.py")} | {"config"}
# Package -> the packages of ours it may import beside itself and those above.
MAY_IMPORT: dict[str, set[str]] = {shared: set() for shared in SHARED} | {
    "config": {"methods"},
    "demo": set(),
    "data": {"demo"},
    "models": set(),
    "states": {"models", "data", "methods"},  # what is stored of packed rows, the method says
    "methods": {"models", "states", "decode"},
    "a method": {"methods", "models", "states", "decode"},
    "target": {"data", "models"},
    "train": {"data", "models", "states", "methods"},
    "train.models": {"a method"},
    "decode": {"models", "states", "methods"},
    "answers": {"data", "decode", "models"},
    "draft": {"models", "methods"},
    "measure": {"data", "decode", "models", "states", "methods", "measure.engines"},
    "measure.engines": set(),
    "report": {"measure", "methods"},
    "cli": {"cluster", "decode", "train", "measure", "measure.engines", "models", "data", "methods", "report", "workflow"},
    "cluster": {"train", "models", "data", "methods"},
    "workflow": {"answers", "cluster", "data", "decode", "measure", "methods", "states", "train"},
}
DOORS = {
    "deepspeed": {"train.engine", "states.load"},
    "flash_attn": {"models.attention.flash"},
    "hydra": {"config.compose"},
    "tokenizers": {"data.tokenize", "target.tokenizer", "target.dequantize"},
    "gguf": {"target.dequantize", "models.gguf_writer"},
    "openai": {"answers.client"},
    "datasets": {"data.hub"},
    "tensorboard": set(),  # torch.utils.tensorboard, in train.trackers
    "wandb": {"train.trackers"},
    "swanlab": {"train.trackers"},
    "snakemake": set(),
    "vllm": {"measure.engines.vllm"},
    "xllamacpp": {"measure.engines.llama_cpp"},
    "openvino_genai": {"measure.engines.openvino"},
    "openvino": {"measure.engines.openvino", "measure.engines.openvino_ir"},
    "optimum": {"measure.engines.openvino_ir"},
}
# What an engine's environment has beside the engine, for its module there.
BESIDE_ENGINES = {
    "measure.engines.openvino": {"numpy"},  # its tensors
    "measure.engines.openvino_ir": {"torch", "transformers", "safetensors"},  # optimum-intel converts torch's modules
}
# Single modules of a room that the table above does not open: the checkpoint's layout has one owner.
EXTRA = {
    ("chain_length", "decode.levels"),  # what a shape is, in numbers alone
    ("measure.engine_files", "draft.folder"),  # a fresh draft is served from a folder like any other
    ("measure.engine_files", "draft.layouts"),  # which an engine may read in a layout of its own
    ("measure.engine_files", "target.layouts"),  # and its target too
    ("draft.__main__", "target.layouts"),  # a target goes with its draft
    ("states.__main__", "train.engine"),  # starts the process group of a partitioned target
    ("report.page", "data.layout_tally"),  # says the same of a dataset as its own room does
    ("draft.__main__", "train.checkpoint.save_load"),
    ("draft.trained", "train.checkpoint.checkpoint_dir"),
}
METHODS = set(methods.names())


def module_name(path: Path, source: Path) -> str:
    """The name below longspec, such as train.checkpoint.save_load."""
    return ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")


def room(module: str) -> str:
    """The package a module belongs to; published faces and engines are rooms of their own, and so is each method."""
    for inner in ("train.models", "measure.engines"):
        if f"{module}.".startswith(f"{inner}."):
            return inner
    return "a method" if method_of(module) else module.split(".")[0]


def method_of(module: str) -> str:
    """The method whose folder a module lies in; empty for others."""
    parts = module.split(".")
    return parts[1] if parts[0] == "methods" and len(parts) > 1 and parts[1] in METHODS else ""


def imports(path: Path) -> Iterator[str]:
    """Every imported name with the module it comes from, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: line {node.lineno}: import by the full name"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.fixture(scope="module")
def imported(root: Path) -> dict[str, set[str]]:
    """Module of ours -> everything it imports."""
    source = root / "src/longspec"
    return {module_name(path, source): set(imports(path)) for path in source.rglob("*.py")}


@pytest.fixture(scope="module")
def ours(imported: dict[str, set[str]]) -> list[tuple[str, str]]:
    """Modules, with each name of ours that they import."""
    pairs = ((module, name) for module, names in imported.items() for name in names)
    return [(module, name.removeprefix("longspec.")) for module, name in pairs if name.startswith("longspec.")]


def test_rooms_import_only_those_below_them(ours: list[tuple[str, str]]) -> None:
    wrong = [
        f"{module} imports {name}"
        for module, name in ours
        if (own := room(module)) != "__init__"
        and (module, name.rpartition(".")[0]) not in EXTRA
        and room(name) not in SHARED | MAY_IMPORT[own] | {own}
    ]
    assert wrong == []


def test_a_method_is_asked_through_the_registry_and_imports_no_other(ours: list[tuple[str, str]]) -> None:
    asked = [(module, name) for module, name in ours if method_of(name) not in ("", method_of(module))]
    assert [f"{module} imports {name}" for module, name in asked if room(module) != "train.models"] == []


def test_outside_its_place_a_method_is_named_in_four_files_at_most(root: Path) -> None:
    source = root / "src/longspec"
    for name in METHODS:
        files = [path for path in source.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        others = [path.relative_to(source) for path in files if path.parent != source / "methods" / name]
        naming = [str(path) for path in others if name in path.as_posix() or name in (source / path).read_text().lower()]
        assert len(naming) <= 4, naming


def test_verbs_are_imported_by_nobody(imported: dict[str, set[str]]) -> None:
    assert [module for module, names in imported.items() if any(".__main__" in name for name in names)] == []


def test_heavy_libraries_have_one_door(imported: dict[str, set[str]]) -> None:
    libraries = [(module, name.split(".")[0]) for module, names in imported.items() for name in names]
    assert [f"{module} imports {name}" for module, name in libraries if module not in DOORS.get(name, {module})] == []


def test_what_runs_in_an_engines_environment_needs_nothing_else(imported: dict[str, set[str]]) -> None:
    """Beside the engine itself, which is loaded with the first job: that environment has other versions of all packages."""
    loaded = {module: names for module, names in imported.items() if room(module) in ("measure.engines", "__init__")}
    loaded["measure"] = imported["measure"]
    assert {"__init__", "measure.engines.vllm", "measure.engines.protocol"} <= loaded.keys()
    for module, names in loaded.items():
        own = {*sys.stdlib_module_names, *BESIDE_ENGINES.get(module, ())}
        own |= {name for name, doors in DOORS.items() if module in doors}
        outside = {name for name in names if name.split(".")[0] not in own}
        assert all(name.startswith("longspec.measure.engines") for name in outside), f"{module}: {outside}"


def test_the_plugin_for_vllm_imports_neither_this_package_nor_transformers(root: Path) -> None:
    names = {name.split(".")[0] for path in (root / "plugins/vllm").rglob("*.py") for name in imports(path)}
    assert {"vllm", "torch"} < names <= {"vllm", "torch", "longspec_vllm"} | set(sys.stdlib_module_names)


def test_an_engine_is_loaded_with_the_first_job_alone() -> None:
    engines = ", ".join(f"longspec.measure.engines.{name}" for name in ("vllm", "llama_cpp", "openvino", "openvino_ir"))
    code = f"import sys, {engines}; print(*{{name.split('.')[0] for name in sys.modules}})"
    loaded = subprocess.run(
        [sys.executable, "-S", "-c", code], env={"PYTHONPATH": str(SOURCE.parent)}, text=True, capture_output=True
    )
    assert loaded.returncode == 0, loaded.stderr
    assert not set(loaded.stdout.split()) & {"torch", "transformers", "vllm", "numpy", "xllamacpp", "openvino", "optimum"}


def test_what_a_login_node_runs_needs_no_torch(imported: dict[str, set[str]]) -> None:
    """Snakemake, the controller and its local jobs: an installation without `[train]` has none."""
    rooms = ("cli", "cluster", "data", "draft", "measure", "report", "target")
    modules = {"target.fetch", "target.tokenizer", "cluster.status", *(f"{room}.__main__" for room in rooms)}
    modules |= {module for module in imported if room(module) in ("config", "workflow") or module.endswith(".settings")}
    code = f"import sys; sys.modules['torch'] = None; import {', '.join(f'longspec.{name}' for name in sorted(modules))}"
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    asked = {name.split(".")[0] for module in imported if room(module) in ("config", "workflow") for name in imported[module]}
    assert not asked & {"torch", "transformers", "deepspeed"}


# No file of a user runs code: where files are opened that could.

DOOR = "models/weight_files.py"  # the one place where weights are opened
STATES = {"states/build.py", "states/load.py"}  # which open files that a job of the workflow has made
SAFETENSORS = {"measure/engines/openvino_ir.py"}  # which runs where this package's modules are missing
LOADERS = {"torch.load", "safe_open", "load_file", "pickle.load", "pickle.loads", "torch.jit.load"}
# transformers asks on the terminal whether to run a folder's code unless it is told not to.
ASKING = ("AutoConfig", "AutoTokenizer", "AutoModel", "AutoModelForCausalLM")
Call = tuple[str, str, ast.Call]  # file, what is called, the call


@pytest.fixture(scope="module")
def calls() -> list[Call]:
    """Every call in src."""
    return [
        (str(path.relative_to(SOURCE)), ast.unparse(node.func), node)
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
    ]


def test_weights_are_opened_by_one_module(calls: list[Call]) -> None:
    assert {file for file, name, _ in calls if name in LOADERS} == {DOOR, *STATES, *SAFETENSORS}
    assert {name for file, name, _ in calls if name in LOADERS and file in SAFETENSORS} == {"load_file"}
    assert {name for file, name, _ in calls if name in LOADERS and file in STATES} == {"safe_open"}


def test_transformers_is_told_everywhere_to_run_nothing(calls: list[Call]) -> None:
    found = [(file, node) for file, name, node in calls if name in [f"{cls}.from_pretrained" for cls in ASKING]]
    assert len(found) >= 4
    for file, node in found:
        told = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        assert told.get("trust_remote_code") == "False", f"{file}: line {node.lineno}"


def test_a_targets_configuration_has_one_reader(calls: list[Call]) -> None:
    """It holds the family against the supported ones before transformers looks for a class."""
    assert {file for file, name, _ in calls if name == "AutoConfig.from_pretrained"} == {"models/target_config.py"}
