"""Published drafts become draft folders that compute what they computed: against plain PyTorch, decoded, exported, trained.

EAGLE-3's in both layouts, then GLIDE's; what a file would run is refused.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

from longspec.atomic_files import read_json, write_json, write_text
from longspec.config import compose, to_yaml
from longspec.draft_vocabulary import read_draft_vocabulary
from longspec.methods.eagle3 import settings as eagle3
from longspec.methods.eagle3.method import METHOD
from longspec.methods.glide.layer import UNUSED, GlideLayer, published_layout
from longspec.states.forward import STATES_ATTENTION, TargetStates
from tests.data.hub_standin import Hub
from tests.draft import published_drafts as published
from tests.draft.conftest import CONFIG, Verb
from tests.draft.eagle3_drafts import recipe_of
from tests.draft.published_drafts import HEADS, IDS, KEY_VALUES, LAYERS, THETA, TOKENS, WIDTH, engines, speculators, tensors
from tests.eager import EAGER
from tests.methods import eagle3_reference as reference
from tests.refusals import refused

Imports = Callable[..., Path]
DEFAULT_LAYERS = (2, LAYERS // 2, LAYERS - 3)
OUTPUTS = "eagle_aux_hidden_state_layer_ids"
OWN = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps")
OWN_SHAPE = {name: published.LAYER[name] for name in OWN} | {"rope_parameters": {"rope_type": "default", "rope_theta": THETA}}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A target's folder, and the target."""
    folder = tmp_path_factory.mktemp("target")
    return folder, published.save_target(folder)


@pytest.fixture
def imports(made: tuple[Path, Any], tmp_path: Path, verb: Verb) -> Imports:
    """Import a draft; returns its folder."""

    def run(source: object, *more: object) -> Path:
        verb("import", source, "--target", made[0], "--out", tmp_path / "imported", *more)
        return tmp_path / "imported"

    return run


def turned(position: int) -> tuple[Tensor, Tensor]:
    """RoPE of the draft's own base and width."""
    angles = position / THETA ** (torch.arange(0, WIDTH, 2).double() / WIDTH)
    return torch.cat([angles, angles]).cos().float(), torch.cat([angles, angles]).sin().float()


def losses_of(target: Any, found: dict[str, Tensor], ids_S: Tensor, steps: int, **kind: Any) -> Tensor:
    """Mean loss of each step by the reference."""
    ids = list(IDS) if len(found["lm_head.weight"]) == len(IDS) else list(range(TOKENS))
    draft = reference.Draft(found, (HEADS, KEY_VALUES), published.EPS, target.lm_head.weight, ids, steps, 1.0, **kind)
    out = target.model(ids_S[None], output_hidden_states=True)
    auxiliary = [out.hidden_states[layer][0] for layer in DEFAULT_LAYERS]
    text = reference.Text(out.hidden_states[0][0], auxiliary, out.last_hidden_state[0], ids_S, turned)
    sums = reference.document_sums(draft, text)
    return torch.stack([loss / max(1, inside) for loss, inside in zip(sums.losses, sums.inside, strict=True)])


def trainer_of(folder: Path, target: Any) -> Any:
    """The draft as a stage begins with it."""
    target.set_attn_implementation(STATES_ATTENTION)
    states = TargetStates(target.requires_grad_(False), attention=EAGER)
    return METHOD.trainer(states, METHOD.stored_settings(folder), folder)


NORMS = [f"fc_norm.{n}" for n in range(3)]
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "the authors' own": (engines, {}, {}),
    "all tokens": (engines, {"proposed": TOKENS}, {}),
    "EAGLE-3.1": (engines, {"norms": (*NORMS,)}, {"fc_norm": True, "norm_output": True}),
    "speculators": (speculators, {}, {"norm_before_residual": True}),
    "speculators, no norm before": (speculators, {}, {"norm_before_residual": False}),
    "speculators, norm before fc": (
        speculators,
        {"norms": ("input_norm",)},
        {"norm_before_residual": True, "norm_before_fc": True},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_published_draft_computes_what_it_did(case: str, made: tuple[Path, Any], imports: Imports, tmp_path: Path) -> None:
    """Losses of each step of a training that begins with it are those of plain PyTorch on the published tensors."""
    layout, shape, fields = CASES[case]
    found = tensors(**shape)
    tables = published.vocabulary() if len(found["lm_head.weight"]) == len(IDS) else {}
    given = {name: tensor for name, tensor in tables.items() if name == "d2t" or layout is speculators}  # which is enough
    folder = imports(layout(tmp_path / "published", found | given, **fields))
    stored = METHOD.stored_settings(folder)
    assert {name: getattr(stored, name) for name in OWN_SHAPE} == OWN_SHAPE
    content = read_json(folder / "config.json")  # of which engines are told
    assert {name: content[name] for name in OWN_SHAPE} == OWN_SHAPE
    assert (content["rope_theta"], content["max_position_embeddings"]) == (THETA, 4096)
    assert (stored.layers, stored.steps) == (DEFAULT_LAYERS, 7)
    torch.testing.assert_close(load_file(folder / "model.safetensors"), found | tables, rtol=0, atol=0)
    trainer, ids = trainer_of(folder, made[1]), torch.randint(0, TOKENS, (1, 14))
    own = trainer(ids, ids, each_step=True).loss
    kind = {name: value for name, value in fields.items() if name in ("norm_output", "norm_before_residual")}
    expected = losses_of(made[1], found, ids[0], stored.steps, **kind)
    torch.testing.assert_close(own, expected, rtol=2e-4, atol=1e-5)


def test_an_exported_import_is_the_published_draft(imports: Imports, verb: Verb, tmp_path: Path) -> None:
    """The same tensors under the same names; what the fields mean is read back by a second import."""
    source = speculators(tmp_path / "published", tensors() | published.vocabulary())
    folder, again = imports(source), tmp_path / "exported"
    before = METHOD.stored_settings(folder)
    verb("export", folder, "--layout", "speculators", "--out", again)
    was = {n: t for file in source.glob("*.safetensors") for n, t in load_file(file).items()}
    torch.testing.assert_close(load_file(again / "model.safetensors"), was, rtol=0, atol=0)
    layer = read_json(again / "config.json")["transformer_layer_config"]
    assert {name: layer[name] for name in OWN_SHAPE} == OWN_SHAPE
    assert read_json(again / "config.json")["norm_before_residual"] is True
    assert METHOD.stored_settings(imports(again)) == before
    ours = folder.rename(tmp_path / "ours")
    assert (imports(ours) / "model.safetensors").read_bytes() == (ours / "model.safetensors").read_bytes()


def test_the_targets_own_embeddings_are_left_out_and_others_refused(
    made: tuple[Path, Any], imports: Imports, tmp_path: Path
) -> None:
    own = made[1].model.embed_tokens.weight.detach()
    found = tensors() | published.vocabulary()
    for embeddings in (own, own.half()):
        folder = imports(engines(tmp_path / "published", found | {"embed_tokens.weight": embeddings}))
        assert "embed_tokens.weight" not in load_file(folder / "model.safetensors")
    other = own.clone()
    other[5] += 1
    with refused(f"{tmp_path}/published: embed_tokens.weight", "differs", kind=SystemExit):
        imports(engines(tmp_path / "published", found | {"embed_tokens.weight": other}))


def test_layers_are_read_as_each_writer_means_them(
    imports: Imports, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the top they are inputs; in eagle_config alone outputs, as SGLang reads them, of which the log tells."""
    found, folder = tensors() | published.vocabulary(), tmp_path / "published"
    inputs: dict[str, Any] = {OUTPUTS: [1, 3, 5]}
    outputs = {"eagle_config": inputs}
    assert METHOD.stored_settings(imports(engines(folder, found, **inputs))).layers == (1, 3, 5)
    assert METHOD.stored_settings(imports(engines(folder, found, **outputs))).layers == (2, 4, 6)
    assert "eagle_config.eagle_aux_hidden_state_layer_ids: taken for outputs" in capsys.readouterr().out
    imports(engines(folder, found, max_position_embeddings=64))
    assert "max_position_embeddings: is 64, the target has" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"hidden_size": 64}, ("/config.json: hidden_size: is 64", "has 32")),
        ({"architectures": ["LlamaForCausalLM"]}, ("/config.json: architectures: ['LlamaForCausalLM']", "eagle3")),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, ("/config.json: rope_parameters: rope_type 'dynamic'",)),
        ({"fc_norm": True}, (":", "fc_norm.0.weight: missing", "recipe.method.fc_norm")),
        ({"layer_types": ["chunked_attention"]}, ("/config.json: layer_types", "is ['chunked", "1 times sliding_attention")),
        ({"eagle_config": {OUTPUTS: ["1", "3", "5"]}}, (f"/config.json: {OUTPUTS}: layers.0", "'1'")),
        ({"midlayer.self_attn.q_proj.bias": torch.zeros(80)}, (":", "midlayer.self_attn.q_proj.bias: unknown")),
        ({"model.norm.weight": torch.ones(32)}, (":", "norm.weight", "twice")),
        ({"midlayer.self_attn.q_norm.weight": torch.ones(10)}, (":", "midlayer.self_attn.q_norm.weight: unknown")),
        ({"d2t": torch.tensor([3, 0, 4, 9, 17, 40, 41, 96])}, (": d2t: draft token 1", "'s 1,", "4 to 96")),
    ],
)
def test_what_cannot_be_represented_is_named(
    fields: dict[str, Any], told: tuple[str, ...], imports: Imports, tmp_path: Path
) -> None:
    """A field of config.json, or a tensor."""
    more = {name: tensor for name, tensor in fields.items() if isinstance(tensor, Tensor)}
    beside = {name: field for name, field in fields.items() if name not in more}
    with refused(f"{tmp_path}/published{told[0]}", *told[1:], kind=SystemExit):
        imports(engines(tmp_path / "published", tensors() | published.vocabulary() | more, **beside))
    assert not (tmp_path / "imported").exists()


def test_a_run_of_another_draft_is_told_what_to_write(
    imports: Imports, tmp_path: Path, made: tuple[Path, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    source = speculators(tmp_path / "published", tensors() | published.vocabulary())
    other = {"vocabulary": 5, "fc_norm": True}
    write_text(tmp_path / "recipe.yaml", to_yaml(recipe_of(**other)))
    values = {"vocabulary": "5, .* 8;", "norm_before_residual": "False, .* True;", "fc_norm": "True, .* False;"}
    facts = [re.compile(f"recipe.method.{key}: [^;]* {both}") for key, both in values.items()]
    with refused(source, *facts, kind=SystemExit) as told:
        imports(source, "--recipe", tmp_path / "recipe.yaml")
    method = yaml.safe_load(re.search(r"recipe: (\{method: .*\})$", str(told.value))[1])["method"]  # type: ignore[index]
    recipe = recipe_of(**other | method)
    eagle3.check(recipe)
    write_text(tmp_path / "recipe.yaml", to_yaml(recipe))
    write_text(made[0] / "tokenizer.json", "{}")
    folder = imports(source, "--recipe", tmp_path / "recipe.yaml")
    vocabulary = read_draft_vocabulary(folder / "draft_vocabulary.json", counted=False)
    assert (vocabulary.ids, vocabulary.size, vocabulary.coverage) == (IDS, TOKENS, {})
    settings = METHOD.stored_settings(folder)
    METHOD.load(METHOD.layer(made[1].config, settings), folder, made[1].config, settings)


def test_a_folder_of_other_files_is_not_replaced(imports: Imports, tmp_path: Path) -> None:
    source, out = engines(tmp_path / "published", tensors() | published.vocabulary()), tmp_path / "imported"
    out.mkdir()
    (out / "rows.jsonl").touch()
    with refused(out, kind=SystemExit):
        imports(source)
    assert [path.name for path in out.iterdir()] == ["rows.jsonl"]
    (out / "rows.jsonl").unlink()
    assert imports(imports(source).parent / "imported") == out  # over an empty folder, and over a draft


def test_from_the_hub_by_hand_and_by_its_manifest(imports: Imports, verb: Verb, hub: Hub, tmp_path: Path) -> None:
    source = engines(tmp_path / "published", tensors() | published.vocabulary())
    files = {path.name: path.read_bytes() for path in source.iterdir()}
    files |= {"README.md": b"not asked for", "mask_embedding.pt": b"looked at"}
    commit = hub.add("owner/draft", files)
    verb("fetch", "--source=hf:owner/draft@main", "--out", tmp_path / "m/manifest.json")
    by_hand = read_json(imports("hf:owner/draft") / "config.json")
    assert hub.asked_for("README.md") == []
    assert hub.asked_for("mask_embedding.pt")
    hub.requests.clear()
    manifest = read_json(tmp_path / "m/manifest.json")
    assert (manifest["commit"], manifest["source"]) == (commit, "hf:owner/draft@main")
    content = read_json(imports(tmp_path / "m/manifest.json") / "config.json")
    assert content["imported"] == {name: manifest[name] for name in ("source", "commit", "files")}
    assert hub.requests == [], "what is here is not asked for"
    assert by_hand["imported"]["files"] == manifest["files"]
    write_json(tmp_path / "m/manifest.json", manifest | {"files": {"config.json": {"bytes": 1}}})
    with refused(tmp_path / "m/files/config.json", re.compile(r"\d+ bytes.* 1;"), kind=SystemExit):
        imports(tmp_path / "m/manifest.json")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """The target of GLIDE drafts as LongSpec published them."""
    CONFIG.save_pretrained(tmp_path / "target")
    return tmp_path / "target"


def weights() -> dict[str, torch.Tensor]:
    """A published state dict: the unused keys and values of the cross attention hold numbers of their own."""
    torch.manual_seed(0)
    state = published_layout(GlideLayer(CONFIG).state_dict())
    return {name: torch.randn_like(tensor) for name, tensor in state.items()}


def folder_of(path: Path, state: dict[str, torch.Tensor], **changed: object) -> Path:
    """As sail/longspec-* have it."""
    path.mkdir()
    save_file({name: tensor.half() for name, tensor in state.items()}, path / "model.safetensors")
    write_json(path / "config.json", CONFIG.to_dict() | {"architectures": ["Qwen2GlideDecoderLayer"]} | changed)
    return path


@pytest.mark.parametrize("form", ["folder", "file", "checkpoint"])
def test_glides_weights_are_taken_as_they_are(tmp_path: Path, target: Path, verb: Verb, form: str) -> None:
    state = {name: tensor.half() for name, tensor in weights().items()}
    source = tmp_path / "weights.pth"
    if form == "folder":
        source = folder_of(tmp_path / "published", state)
    else:
        torch.save({f"draft_model.{name}" if form == "checkpoint" else name: part for name, part in state.items()}, source)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(to_yaml(compose("train", ["run=demo"]).recipe))
    verb("import", source, "--target", target, "--out", out := tmp_path / "out", "--recipe", recipe)
    found = load_file(out / "model.safetensors")
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(found[name], torch.zeros_like(tensor) if name in UNUSED else tensor), name
    assert read_json(out / "config.json")["draft"] == "glide"


def test_a_glide_draft_of_another_target_is_refused(tmp_path: Path, target: Path, verb: Verb) -> None:
    source = folder_of(tmp_path / "published", weights(), hidden_size=64)
    with refused(source / "config.json", "hidden_size: is 64", "is 32", kind=SystemExit):
        verb("import", source, "--target", target, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


class Payload:
    """Unpickled, it makes a folder."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.made),)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_payload_does_not_run(tmp_path: Path, target: Path, verb: Verb, zipped: bool) -> None:
    file, made = tmp_path / "weights.pth", tmp_path / "made by a payload"
    torch.save(weights() | {"a": Payload(made)}, file, _use_new_zipfile_serialization=zipped)
    with refused(file, "posix.mkdir", kind=SystemExit):
        verb("import", file, "--target", target, "--out", tmp_path / "out")
    assert not made.exists()
    torch.load(file, weights_only=False)
    assert made.is_dir()  # it would have been made
