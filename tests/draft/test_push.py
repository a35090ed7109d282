"""The `final` folder and its way to the hub, which is held in memory."""

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import httpx2
import pytest
import torch
import yaml
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from transformers import LlamaConfig

from longspec.atomic_files import describe_files, files_below, read_json, write_json, write_text
from longspec.chain_length import ChainAcceptance, write_acceptance
from longspec.config import Recipe as RecipeSchema
from longspec.config import compose_stage, load, to_yaml
from longspec.draft.folder import draft_config, write_draft
from longspec.draft.hub_upload import model_card
from longspec.methods.glide.layer import GlideLayer, published_layout
from tests.draft.conftest import CONFIG, Verb
from tests.refusals import refused

STAGES = ("base", "long", "longcot")


@dataclass
class Repository:
    """Files of each branch."""

    private: bool
    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {}})


class Hub:
    """`token` may write to the repositories of `owner`."""

    token, owner, address = "secret", "me", "http://hub"

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}

    def client(self, endpoint: str, token: str) -> Any:
        """Stands in the place of HfApi."""
        made = create_autospec(HfApi, instance=True)
        made.endpoint = endpoint

        def create_repo(name: str, *, private: bool | None, exist_ok: bool) -> None:
            if endpoint != self.address:
                raise ConnectionError("nobody listens")
            refused = 401 if token != self.token else 403 if not name.startswith(f"{self.owner}/") else None
            if refused:
                raise HfHubHTTPError("not yours", response=httpx2.Response(refused, request=httpx2.Request("POST", endpoint)))
            assert exist_ok
            self.repositories.setdefault(name, Repository(bool(private)))

        def create_branch(name: str, *, branch: str, exist_ok: bool) -> None:
            assert exist_ok
            self.repositories[name].branches.setdefault(branch, {})

        def create_commit(name: str, operations: list[Any], *, commit_message: str, revision: str) -> Any:
            for each in operations:
                with each.as_file() as handle:
                    self.repositories[name].branches[revision][each.path_in_repo] = handle.read()
            assert commit_message
            return SimpleNamespace(commit_url=f"{endpoint}/{name}/commit/{'1' * 40}")

        made.create_repo.side_effect, made.create_branch.side_effect = create_repo, create_branch
        made.create_commit.side_effect, made.model_info.side_effect = create_commit, self.repositories.__getitem__
        return made


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub()
    monkeypatch.setenv("HF_ENDPOINT", hub.address)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    monkeypatch.setattr("huggingface_hub.HfApi", hub.client)
    return hub


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three finished stages, and the draft of the last one."""
    folder = tmp_path_factory.mktemp("stages")
    CONFIG.save_pretrained(folder / "model")
    write_text(folder / "model/tokenizer.json", "{}")
    write_json(folder / "target.json", {"path": str(folder / "model")})
    tokenizer = describe_files(folder / "model", ["tokenizer.json"])
    write_json(folder / "tokenizer.json", {"path": str(folder / "model"), "files": tokenizer})
    write_json(folder / "rows.json", {"rows": 1})
    for number, stage in enumerate(STAGES):
        composed = compose_stage("published", "sinkpi-slicing", stage)
        for section in ("recipe", "runtime"):
            write_text(folder / stage / f"{section}.yaml", to_yaml(composed[section]))
        times = {"training_seconds": 1.0, "saving_seconds": 0.1, "world_size": 8, "zero_stage": 1, "versions": {}}
        times |= {"step": 100, "tokens_seen": 10**6 * (number + 1)}
        write_json(folder / stage / "checkpoint.json", times | {"identity": {"init_weights": "0f" * 32}})
    recipe = load(folder / "longcot/recipe.yaml", RecipeSchema)
    published = published_layout(GlideLayer(CONFIG).state_dict())
    write_draft(folder / "draft", published, draft_config(str(folder / "model"), recipe))
    return folder


@pytest.fixture
def final_draft(stages: Path, tmp_path: Path, verb: Verb) -> Path:
    """A final draft folder, put together by the verb."""
    shutil.copytree(stages, tmp_path, dirs_exist_ok=True)
    inputs = {"--draft": "draft", "--target": "target.json", "--tokenizer": "tokenizer.json", "--data": "rows.json"}
    paths = [part for option, name in inputs.items() for part in (option, tmp_path / name)]
    verb("final", *paths, "--stages", *(tmp_path / stage for stage in STAGES), "--out", tmp_path / "final")
    return tmp_path / "final"


def interval(mean: float) -> dict[str, Any]:
    return {"mean": mean, "low": mean - 0.1, "high": mean + 0.1, "prompts": 64}


@pytest.fixture
def report(tmp_path: Path) -> Path:
    """As python -m longspec.report leaves it, as far as a card needs it."""
    drafters = {"longcot": 2.5, "lookup": 1.5}
    by_task = {name: {"short": interval(mean), "long": interval(mean + 1)} for name, mean in drafters.items()}
    content = {
        "variants": {"sinkpi-slicing": by_task},
        "overall": {"sinkpi-slicing": {name: interval(mean + 0.5) for name, mean in drafters.items()}},
        "against_baselines": {"sinkpi-slicing": [{"before": "lookup", "stage": "longcot"}]},
        "measured": {"sinkpi-slicing": {"longcot": [{"temperature": 0.6, "shape": [4, 6]}, {"temperature": 0.0, "shape": 3}]}},
    }
    write_json(tmp_path / "report.json", content)
    return tmp_path / "report.json"


def test_vllm_reads_the_folders_own_weights(final_draft: Path, verb: Verb, tmp_path: Path) -> None:
    """In a folder in it, which drafts from before it get by `export`; elsewhere with a copy."""
    link = final_draft / "vllm/model.safetensors"
    assert (link.is_symlink(), link.readlink()) == (True, Path("../model.safetensors"))
    config = read_json(final_draft / "vllm/config.json")
    assert (config["architectures"], config["num_hidden_layers"], config["head_dim"]) == (["GlideForCausalLM"], 1, 8)
    assert config["glide"]["window"] == 512
    assert config["glide"]["target"] == read_json(final_draft / "config.json")["target"]
    assert LlamaConfig(**config).max_position_embeddings >= 2**30, "vLLM drafts up to the lower one of draft and served target"
    shutil.rmtree(final_draft / "vllm")
    verb("export", final_draft, "--layout", "vllm")
    assert read_json(final_draft / "vllm/config.json") == config
    assert link.read_bytes() == (final_draft / "model.safetensors").read_bytes()
    verb("export", final_draft, "--layout", "vllm", "--out", tmp_path / "elsewhere")
    assert not (tmp_path / "elsewhere/model.safetensors").is_symlink()
    assert read_json(tmp_path / "elsewhere/config.json") == config
    (final_draft / "model.safetensors").unlink()
    with refused(final_draft / "model.safetensors", "missing", "vllm", kind=SystemExit):
        verb("export", final_draft, "--layout", "vllm")


def test_the_chosen_stages_draft_is_published_with_what_it_was_trained_by(
    final_draft: Path, tmp_path: Path, verb: Verb
) -> None:
    """Stage long of three: its weights, its training and the one before; provenance tells of all and of the choice."""
    for stage in STAGES:
        recipe = load(tmp_path / stage / "recipe.yaml", RecipeSchema)
        state = {name: torch.full_like(tensor, len(stage)) for name, tensor in GlideLayer(CONFIG).state_dict().items()}
        write_draft(tmp_path / stage / "draft", published_layout(state), draft_config(str(tmp_path / "model"), recipe))
        told = read_json(tmp_path / stage / "checkpoint.json")
        write_json(tmp_path / stage / "checkpoint.json", told | {"versions": {"torch": stage}, "git_commit": f"of {stage}"})
    figures = {stage: interval(2.0 + len(stage) % 2) for stage in STAGES}
    choice = {"stage": "long", "why": "no earlier one is better", "figures": figures, "records": {"slimpajama": [1, 4]}}
    write_json(tmp_path / "final_stage.json", choice)
    paths = [part for name in ("target", "tokenizer") for part in (f"--{name}", tmp_path / f"{name}.json")]
    paths += ["--data", tmp_path / "rows.json", "--out", tmp_path / "chosen", "--choice", tmp_path / "final_stage.json"]
    verb("final", *paths, "--stages", *(tmp_path / stage for stage in STAGES))
    weights = {stage: (tmp_path / stage / "draft/model.safetensors").read_bytes() for stage in STAGES}
    assert (tmp_path / "chosen/model.safetensors").read_bytes() == weights["long"] != weights["longcot"]
    assert read_json(tmp_path / "chosen/config.json")["stage"] == "long"
    assert list(yaml.safe_load((tmp_path / "chosen/training_config.yaml").read_text())) == ["base", "long"]
    provenance = read_json(tmp_path / "chosen/provenance.json")
    assert (provenance["final"], provenance["order"]) == (choice, list(STAGES))
    assert (provenance["versions"], provenance["git_commit"]) == ({"torch": "long"}, "of long")
    assert "final" not in read_json(final_draft / "provenance.json")
    card = model_card(tmp_path / "chosen", "me/draft", "main", None, None)
    assert "Published is stage long of base, long, longcot: no earlier one is better." in card
    assert "| longcot |" not in card


@pytest.mark.parametrize(("private", "revision"), [(False, "main"), (True, "v2")])
def test_every_byte_and_a_card_arrive(
    final_draft: Path, report: Path, verb: Verb, hub: Hub, private: bool, revision: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--report", report, "--revision", revision] + ["--private"] * private
    write_acceptance(final_draft, [ChainAcceptance(0.0, ((3, 4),))])  # as the report leaves it
    names = files_below(final_draft)
    (final_draft / "notes.txt").write_text("of the owner's own")
    shutil.rmtree(final_draft / "vllm")  # as a stage's draft by hand, or one from before this layout
    verb("push", final_draft, "--repo", "me/draft", *options)
    repository = hub.repositories["me/draft"]
    assert repository.private is private
    stored = dict(repository.branches[revision])
    card = stored.pop("README.md").decode()
    assert stored == {name: (final_draft / name).read_bytes() for name in names}
    assert f"{hub.address}/me/draft/commit/" in capsys.readouterr().out
    header, body = card.split("---\n", 2)[1:]
    assert yaml.safe_load(header)["base_model"] == "Qwen/QwQ-32B-Preview"
    for line in (
        "| this draft | 3.50 [3.40, 3.60] | 2.50 [2.40, 2.60] | 3.00 [2.90, 3.10] |",
        "64 prompts, temperature 0.6, tree 4-6.",
        "| lookup | 2.50 [2.40, 2.60] | 1.50 [1.40, 1.60] | 2.00 [1.90, 2.10] |",
        "| base | slimpajama | 1024 | base | 1,000,000 |",
        "| longcot | longcot | 32768 | longcot | 3,000,000 |",
        "| base | 0.0005 | 2048 | 100 | AdamW",
        "The first of these stages began with the weights of another draft",
    ):
        assert line in body
    assert str(final_draft.parent) not in card
    served = next(line for line in body.splitlines() if line.startswith("vllm serve"))
    speculative = json.loads(served.split("--speculative-config ")[1].strip("'"))
    assert speculative == {"method": "draft_model", "model": "draft/vllm", "num_speculative_tokens": 4}
    called = next(line for line in body.splitlines() if line.startswith("glide ="))
    assert called == 'glide = Qwen2Glide.from_pretrained("Qwen/QwQ-32B-Preview", glide_path=draft)'
    assert ('revision="v2"' in body) is (revision == "v2")
    verb("push", final_draft, "--repo", "me/draft", *options)  # a second time: the repository is there
    before = dict(repository.branches[revision])
    if not private:
        with refused("me/draft", "public", "--private", kind=SystemExit):
            verb("push", final_draft, "--repo", "me/draft", "--private")
    assert repository.branches[revision] == before


def test_what_is_refused_leaves_nothing_on_the_hub(
    final_draft: Path, report: Path, verb: Verb, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def push_refused(place: str | Path, fact: str, repository: str = "me/draft", *options: object) -> None:
        with refused(place, fact, kind=SystemExit):
            verb("push", final_draft, "--repo", repository, *options)
        assert hub.repositories == {}

    push_refused("http://hub/you/draft", "HF_TOKEN", "you/draft")
    for held, variant in (({"a": {}, "b": {}}, []), ({"a": {"base": {}}}, ["--variant", "a"])):
        write_json(report, read_json(report) | {"variants": held})
        push_refused(report, "longcot of --variant", "me/draft", "--report", report, *variant)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    push_refused("http://127.0.0.1:9/me/draft", "HF_TOKEN")
    monkeypatch.delenv("HF_TOKEN")
    push_refused("HF_TOKEN", "not set")
    content = bytearray((final_draft / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (final_draft / "model.safetensors").write_bytes(content)
    push_refused(final_draft / "model.safetensors", "SHA-256")
    (final_draft / "provenance.json").unlink()
    push_refused(final_draft / "provenance.json", "no such")
