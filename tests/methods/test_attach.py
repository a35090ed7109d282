"""A draft beside its target by hand: the documented lines, every kind of weight file, and what does not fit."""

import io
import json
import re
from pathlib import Path
from typing import Any

import hydra
import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from transformers import AutoConfig

from longspec.atomic_files import read_json, write_json
from longspec.config import Model, Recipe, compose
from longspec.decode.generate import load_drafter
from longspec.draft.folder import draft_config, write_draft
from longspec.methods.draft_files import target_and_draft
from longspec.methods.glide.attach import attach
from longspec.methods.glide.layer import published_layout
from longspec.methods.glide.settings import TARGETS, Draft, Method
from longspec.methods.glide.trainer import PUBLISHED, Glide, LlamaGlide, MistralGlide, Qwen2Glide, Qwen3Glide, class_for
from tests.damaged import FILES
from tests.refusals import refused
from tests.targets import VOCABULARY, save_target

SETTINGS = Draft(window=33, anchors="fixed", lag_mode="fixed", lag=3, loss="mix", final_norm=True)
CLASSES = {"llama": LlamaGlide, "mistral": MistralGlide, "qwen2": Qwen2Glide, "qwen3": Qwen3Glide, "qwen3_moe": Qwen3Glide}


def save_draft(target: str, folder: Path, settings: Draft = SETTINGS, stage: str = "longcot") -> Glide:
    """A draft folder as the workflow writes it, and the glide whose draft it holds."""
    torch.manual_seed(11)
    glide = attach(target, dtype=torch.float32, draft=settings)
    for parameter in glide.draft_model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    recipe = OmegaConf.structured(
        Recipe(stage=stage, model=Model(_target_="x", source="build"), method=Method(), draft=settings)
    )
    write_draft(folder, published_layout(glide.draft_model.state_dict()), draft_config(target, recipe))
    return glide


@pytest.mark.parametrize(("model_type", "path"), TARGETS.items())
def test_a_published_import_path_is_the_familys_class(model_type: str, path: str) -> None:
    assert hydra.utils.get_method(path) == CLASSES[model_type].from_pretrained
    assert class_for(model_type) is CLASSES[model_type]


def same_loss(left: Glide, right: Glide) -> bool:
    torch.manual_seed(5)
    ids = torch.randint(0, VOCABULARY, (1, 50))
    return torch.equal(left(ids, ids, lag=2).loss, right(ids, ids, lag=2).loss)


@pytest.mark.parametrize("begin", [attach, Qwen2Glide.from_pretrained], ids=["attach", "from_pretrained"])
def test_a_draft_folder_alone(tmp_path: Path, begin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A workflow's folders, seen from elsewhere; the target is named as its manifest has it, and stands in no folder above."""
    monkeypatch.chdir(tmp_path)
    save_target("qwen2", Path("models/alone/target"))
    draft = Path("results/demo/sinkpi-slicing/final_draft")
    wanted = save_draft("models/alone/target", draft)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    glide = begin(str(tmp_path / draft), dtype=torch.float32)
    assert glide.draft_settings == SETTINGS
    assert same_loss(glide, wanted)
    (tmp_path / "models").rename(tmp_path / "gone")
    with refused(tmp_path / draft / "config.json", "models/alone/target"):
        begin(str(tmp_path / draft))


def test_a_draft_of_a_target_from_the_hub_names_its_repository(tmp_path: Path) -> None:
    path = save_target("qwen2", tmp_path / "target")
    save_draft(path, tmp_path / "draft")
    content = read_json(tmp_path / "draft/config.json")
    write_json(tmp_path / "draft/config.json", content | {"target_path": "gone", "target_source": "hf:owner/name"})
    assert target_and_draft(str(tmp_path / "draft"), None) == ("owner/name", str(tmp_path / "draft"))


@pytest.mark.parametrize("name", ["draft_model_weights.pth", "model.safetensors", "."])
def test_every_kind_of_weight_file(target_path: str, tmp_path: Path, name: str) -> None:
    """The file of a folder knows the folder's variant; alone it is taken for a published one."""
    wanted = save_draft(target_path, tmp_path / "draft", PUBLISHED)
    glide = attach(target_path, str(tmp_path / "draft" / name), dtype=torch.float32)
    assert glide.draft_settings == PUBLISHED
    assert same_loss(glide, wanted)
    if name != ".":
        alone = (tmp_path / "draft" / name).rename(tmp_path / name)
        assert same_loss(attach(target_path, str(alone), dtype=torch.float32), wanted)


def test_the_contract_of_the_classes(target_path: str, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(target_path)
    family = CLASSES[config.model_type]
    wanted = save_draft(target_path, tmp_path / "draft")
    by_position = family(config, target_path, str(tmp_path / "draft"), torch.float32)
    assert same_loss(by_position, wanted)
    fresh = family(config, target_path)
    assert fresh.target.dtype == next(fresh.draft_model.parameters()).dtype
    assert fresh.target.dtype == (torch.bfloat16 if torch.cuda.is_available() else torch.float32)
    half = family(config, target_path, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in half.draft_model.parameters()} == {torch.bfloat16}
    assert half.model.rotary_emb.inv_freq.dtype == torch.float32
    assert half.model is half.target.model
    assert half.lm_head is half.target.lm_head


def test_another_targets_draft_is_refused_field_by_field(tmp_path: Path) -> None:
    draft, path = str(tmp_path / "draft"), save_target("qwen2-yarn", tmp_path / "other")
    save_draft(save_target("qwen2", tmp_path / "qwen2"), Path(draft))
    for given in (draft, f"{draft}/model.safetensors"):
        with refused(f"{draft}/config.json", re.compile("rope_parameters: .*'default'.*'yarn'")):
            attach(path, given)


def test_an_unused_tensor_is_held_to_its_shape(tmp_path: Path) -> None:
    target = save_target("qwen2", tmp_path / "qwen2")
    save_draft(target, tmp_path / "draft", PUBLISHED)
    state = torch.load(tmp_path / "draft/draft_model_weights.pth", weights_only=True)
    torch.save(state | {"cross_attn.k_proj.bias": torch.zeros(5)}, tmp_path / "x.pth")
    with refused(tmp_path / "x.pth", "cross_attn.k_proj.bias: is [5]", "[16]"):
        attach(target, str(tmp_path / "x.pth"))


@pytest.mark.parametrize("final_norm", [False, True])
def test_a_recipe_that_disagrees_about_the_final_norm_is_refused(tmp_path: Path, final_norm: bool) -> None:
    target = save_target("qwen2", tmp_path / "qwen2")
    save_draft(target, tmp_path / "draft", Draft(anchors="off", lag_mode="fixed", final_norm=final_norm))
    other = Draft(anchors="off", lag_mode="fixed", final_norm=not final_norm)
    what = "unknown" if final_norm else "missing"
    with refused(tmp_path / "draft/model.safetensors", f"final_layernorm.weight: {what}; recipe.draft.final_norm"):
        attach(target, str(tmp_path / "draft"), draft=other)


def test_the_target_follows_its_draft_to_a_device_and_keeps_its_dtype(target_path: str) -> None:
    glide = attach(target_path, dtype=torch.float32)
    glide.to("meta")
    assert glide.target.device.type == "meta"
    again = attach(target_path, dtype=torch.float32).double()
    assert again.target.dtype == torch.float32


@pytest.mark.gpu
def test_on_a_gpu_it_is_the_same(target_path: str) -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (2, 60))
    glide = attach(target_path, dtype=torch.float32)
    wanted = glide(ids, ids, lag=3)
    glide.to("cuda")
    got = glide(ids.cuda(), ids.cuda(), lag=3)
    torch.testing.assert_close(got.loss.cpu(), wanted.loss, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got.llm_loss.cpu(), wanted.llm_loss, rtol=1e-4, atol=1e-4)


def test_damaged_weights_are_named_in_one_line(tmp_path: Path) -> None:
    target_path = save_target("qwen2", tmp_path / "target")
    state = {key: torch.randn_like(t) for key, t in attach(target_path, dtype=torch.float32).draft_model.state_dict().items()}
    for name, damaged in FILES.items():
        path = tmp_path / name
        path.write_bytes(damaged(state))
        with refused(path) as refusal:
            attach(target_path, str(path), dtype=torch.float32)
        assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["empty.safetensors", "cut.safetensors"])
def test_damaged_weights_of_a_target_are_named_in_one_line(tmp_path: Path, name: str) -> None:
    target = save_target("qwen2", tmp_path / "target")
    path = tmp_path / "target/model.safetensors"
    path.write_bytes(FILES[name](load_file(path)))
    with refused(path, re.compile("(empty|damaged).* again$")) as refusal:
        attach(target)
    assert "\n" not in str(refusal.value)


def test_hydra_calls_the_class_of_an_experiment_as_published(tmp_path: Path, root: Path) -> None:
    """hydra.utils.call(cfg.model, path, state_dict=...), with names as in a training checkpoint and without their prefix."""
    target_path = save_target("qwen2", tmp_path / "target")
    model = compose("qwq_glide_8gpu_slim6b", [], root / "config/exp").recipe.model
    wanted = save_draft(target_path, tmp_path / "draft", PUBLISHED)
    state = dict(wanted.draft_model.state_dict())
    for named in (state, {f"draft_model.{name}": tensor for name, tensor in state.items()}):
        assert same_loss(hydra.utils.call(model, target_path, state_dict=named, dtype=torch.float32), wanted)
    cut = state | {"mlp.up_proj.weight": state["mlp.up_proj.weight"][:-1]}
    with pytest.raises(Exception, match=r"state_dict: .*mlp\.up_proj\.weight: is \["):
        hydra.utils.call(model, target_path, state_dict=cut, dtype=torch.float32)
    with pytest.raises(Exception, match=r"ignore_mismatched_sizes: .*leave it out"):
        hydra.utils.call(model, target_path, state_dict=cut, dtype=torch.float32, ignore_mismatched_sizes=True)


@pytest.mark.parametrize(
    ("change", "place", "fact"),
    [
        (None, "line 1", "JSON"),
        ({"target": None}, "target: is None", "object"),
        ({"settings": {"lag_mode": "fixed"}}, "settings: anchors", "missing"),
        ({"settings": {"anchors": "off", "lag_mode": "fixed", "window": "512"}}, "settings.window", "number from 1"),
        ({"settings": {"anchors": "off", "lag_mode": "fixed", "loss": None}}, "settings.loss: null", "mix"),
    ],
)
def test_a_spoiled_config_of_a_draft_is_named_with_its_field(
    tmp_path: Path, change: dict[str, Any] | None, place: str, fact: str
) -> None:
    target = save_target("qwen2", tmp_path / "qwen2")
    glide, path = save_draft(target, tmp_path / "draft"), tmp_path / "draft/config.json"
    path.write_text("{" if change is None else json.dumps(read_json(path) | change))
    for door in (lambda: attach(target, str(tmp_path / "draft")), lambda: load_drafter(glide.target, tmp_path / "draft")):
        with refused(f"{path}: {place}", fact, "again") as refusal:
            door()
        assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("begin", "model_type"),
    [(attach, "unheard_of"), (attach, None), (LlamaGlide.from_pretrained, "unheard_of"), (LlamaGlide.from_pretrained, "llama")],
)
def test_no_code_of_a_targets_folder_runs(
    tmp_path: Path, begin: Any, model_type: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever answers `y` to transformers' question lets it run: it must not be asked."""
    folder, ran = Path(save_target("llama", tmp_path / "target")), tmp_path / "ran"
    code = "from transformers import LlamaConfig, LlamaForCausalLM\n"
    code += "class Config(LlamaConfig): model_type = 'unheard_of'\nclass Model(LlamaForCausalLM): config_class = Config\n"
    (folder / "code.py").write_text(f"open({str(ran)!r}, 'w')\n{code}")
    maps = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    content = read_json(folder / "config.json") | {"model_type": model_type, "auto_map": maps}
    write_json(folder / "config.json", content)
    answers = io.StringIO("y\n" * 9)
    monkeypatch.setattr("sys.stdin", answers)
    if model_type == "llama":
        begin(str(folder))
    else:
        with refused(f"{folder}/config.json: model_type {model_type!r}", "are llama, "):
            begin(str(folder))
    assert not ran.exists()
    assert answers.tell() == 0


def test_a_target_that_is_not_there_is_named(tmp_path: Path) -> None:
    for path in ("models/gone/target", str(tmp_path)):
        with refused(f"{path}/config.json: no") as refusal:
            attach(path)
        assert "\n" not in str(refusal.value)


def test_the_documented_lines(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (root / "docs/attach.md").read_text(), re.DOTALL)
    assert len([line for line in blocks[0].splitlines() if line]) <= 3
    target = save_target("qwen2", tmp_path / "models/demo/target")
    wanted = save_draft(target, tmp_path / "results/demo/sinkpi-slicing/final_draft")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    attached = []
    for block in blocks:
        exec(block, names)  # the document's own lines
        attached.append(names["glide"])
    assert same_loss(attached[0], wanted)
    assert same_loss(attached[1], wanted)
    assert [len(row.ids) for row in names["decoded"].rows] == [32, 32]
