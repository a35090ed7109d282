"""Preflight: each check's failing case, provoked; two ranks that find all well; a rank that never comes."""

import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from longspec.atomic_files import describe_files, read_json, write_json, write_text
from longspec.cluster import preflight, preflight_job, preflight_node
from longspec.cluster.preflight_ranks import FAIL, OK, WARN, Facts, Finding, Place, host_memory
from longspec.config import Recipe, Runtime, compose, load, to_yaml, typed
from longspec.data.chat.chat_template import CHATML
from longspec.distributed import Ranks
from longspec.models.attention import flash
from longspec.target.fetch import write_manifest
from longspec.tokenizer_files import tokenizer_files
from longspec.train import tracking
from longspec.train.estimate.memory import estimate, peak
from tests.corpus import Corpus
from tests.eager import attend
from tests.jobs import RECIPE, free_port, torchrun
from tests.warm_jobs import popen
from tests.workflow.planning import Workflow, copy_to

pytestmark = pytest.mark.slow  # half a minute and more as a whole

MIB = 2**20


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, corpus: Corpus) -> Path:
    """A folder with a stage's frozen files, a target and its tokenizer."""
    folder = tmp_path_factory.mktemp("job")
    config = compose("train", RECIPE)
    write_text(folder / "recipe.yaml", to_yaml(config.recipe))
    write_text(folder / "runtime.yaml", to_yaml(config.runtime))
    torch.manual_seed(5)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    target = Qwen2ForCausalLM(Qwen2Config(vocab_size=corpus.build.vocabulary, num_key_value_heads=2, **shape))
    target.save_pretrained(folder / "target")
    described(folder)
    shutil.copytree(read_json(corpus.tokenizer)["path"], folder / "tokenizer")
    described_tokenizer(folder)
    return folder


def described(folder: Path) -> None:
    """Write the target's manifest."""
    files = describe_files(folder / "target", ["config.json", "model.safetensors"])
    write_json(folder / "target_manifest.json", {"path": str(folder / "target"), "source": "test", "files": files})


def described_tokenizer(folder: Path) -> None:
    """Write the tokenizer's manifest."""
    names = tokenizer_files(folder / "tokenizer")
    write_manifest(folder / "tokenizer_manifest.json", folder / "tokenizer", "test", names)


MakePlace = Callable[..., Place]


@pytest.fixture
def place_in(tmp_path: Path, job: Path) -> MakePlace:
    """The only rank of a job in a copy of its folder, with other settings."""
    folder = tmp_path / "job"
    shutil.copytree(job, folder)
    described(folder)
    described_tokenizer(folder)

    def make(*overrides: str, **changed: Any) -> Place:
        config = compose("train", [*RECIPE, *overrides])
        recipe = typed(to_yaml(config.recipe), Recipe, folder / "recipe.yaml")
        runtime = typed(to_yaml(config.runtime), Runtime, folder / "runtime.yaml")
        files = {name: folder / f"{name}_manifest.json" for name in ("target", "tokenizer")}
        facts = {0: Facts("here", {"torch": "1"}, 0, host_memory=host_memory())}
        place = Place(Ranks(0, 0, 1), 5.0, [recipe], [runtime], out=folder / "out", store=Store(), facts=facts, **files)
        return replace(place, **changed)

    return make


class Store:
    """A key-value store in this process."""

    def __init__(self) -> None:
        self.content: dict[str, str] = {}
        self.set, self.get = self.content.__setitem__, self.content.__getitem__

    def check(self, names: list[str]) -> bool:
        return all(name in self.content for name in names)


def found(name: str, place: Place) -> Finding:
    """What a check of this rank finds, as the program runs it."""
    finding = preflight.limited(preflight.CHECKS[name], place, 60)
    assert finding is not None
    return finding


def start(
    job: Path, out: Path, *options: str, launcher: list[str] | None = None, module: str = "longspec.cluster", **environment: str
) -> subprocess.Popen[str]:
    arguments = [f"--recipe={job / 'recipe.yaml'}", f"--runtime={job / 'runtime.yaml'}", f"--out={out}"]
    arguments += [f"--{name}={job / f'{name}_manifest.json'}" for name in ("target", "tokenizer")]
    command = [*(launcher or [sys.executable]), "-m", module, "preflight", *arguments, *options]
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    kept |= {"OMP_NUM_THREADS": "1", **environment}
    return popen(command, env=kept, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def ended(process: subprocess.Popen[str]) -> tuple[int, str, dict[str, str]]:
    """Exit code, all it printed, and the level of each check by its name."""
    text, _ = process.communicate(timeout=200)
    rows = re.findall(r"^(ok|warn|fail) +([a-z0-9 ]+?)  ", text, re.MULTILINE)
    return process.returncode, text, {name: level for level, name in rows}


def test_two_ranks_find_all_well(job: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    code, text, levels = ended(start(job, tmp_path / "out", f"--report={report}", launcher=torchrun(2)))
    assert code == 0, text
    # A machine without GPUs is a warning.
    assert set(levels) == set(preflight.CHECKS)
    assert {name for name, level in levels.items() if level != OK} <= {"gpus"}
    assert levels["gpus"] == (OK if torch.cuda.is_available() else WARN)
    assert re.search(r"^ok +collective +(gloo|nccl) over 2 ranks, sums exact; \d+ MiB in .* GB/s", text, re.MULTILINE)
    warnings = sum(level == WARN for level in levels.values())
    last = text.splitlines()[-1]
    assert last == f"preflight: {len(levels) - warnings} ok, {warnings} warnings, 0 failed"
    told = json.loads(report.read_text())
    assert [check["name"] for check in told["checks"]] == list(preflight.CHECKS)
    assert told["summary"] == last
    assert list((tmp_path / "out").iterdir()) == []


def test_without_a_launcher_all_checks_run_though_one_fails(job: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, text, levels = ended(start(job, tmp_path / "file/out"))
    assert code == 1
    assert set(levels) == set(preflight.CHECKS)
    assert [name for name, level in levels.items() if level == FAIL] == ["disk"]
    assert levels["shared folder"] == WARN
    assert re.search(r"^preflight: \d+ ok, \d warnings, 1 failed$", text.splitlines()[-1])


def test_a_rank_that_never_comes_is_named_in_time(job: Path, tmp_path: Path) -> None:
    began = time.monotonic()
    seconds = 8  # between the starts of the two that come too
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    first = start(job, tmp_path / "out", f"--seconds={seconds}", **alone)
    third = start(job, tmp_path / "out", f"--seconds={seconds}", **alone | {"RANK": "2", "LOCAL_RANK": "1"})
    code, text, levels = ended(first)
    assert code == 1
    assert f"rank 1 of 3 did not come within {seconds} s" in text
    assert f"came: rank 0 ({socket.gethostname()}), rank 2 ({socket.gethostname()})" in text
    assert levels["ranks"] == FAIL
    assert levels["collective"] == WARN
    assert levels["target"] == OK
    assert ended(third)[0] == 0
    assert time.monotonic() - began < 6 * seconds  # and not torch's own half an hour


CRASHING = """
import os, runpy, torch
if os.environ["RANK"] == "1":
    torch.autograd.grad = lambda *_: os.abort()
runpy.run_module("longspec.cluster", run_name="__main__")
"""


def test_a_rank_that_dies_in_a_check_is_named(job: Path, tmp_path: Path) -> None:
    """A crash, as of a library that was built for another GPU: the launcher names the rank, the table the check before."""
    (tmp_path / "crashing.py").write_text(CRASHING)
    launcher = [sys.executable, "-m", "longspec.cluster.torchrun", "--nproc-per-node=2", "--standalone"]
    places = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    options: dict[str, Any] = {"launcher": launcher, "module": "crashing", "PYTHONPATH": places}
    code, text, levels = ended(start(job, tmp_path / "out", "--seconds=15", **options))
    assert code == 1
    assert re.search(r"^error: rank 1 on .* was killed by SIGABRT$", text, re.MULTILINE), text
    assert list(levels)[-1] == "collective"


def test_sums_that_fail(place_in: MakePlace, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Place) -> Finding:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(preflight_node, "_all_reduce", broken)
    finding = found("collective", place_in())
    assert finding.found == "RuntimeError: Connection closed by peer"
    assert "NCCL_SOCKET_IFNAME" in finding.fix


def answered(place: Place, rank: int, name: str, finding: Finding) -> None:
    """Have another rank tell what it has found."""
    replace(place, ranks=replace(place.ranks, rank=rank)).tell(f"found {name}", asdict(finding))


@pytest.fixture
def of_two(place_in: MakePlace, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Rank 0 of two, with three checks of which each is well here."""
    names = ("versions", "attention", "loss")
    monkeypatch.setattr(preflight, "CHECKS", {name: lambda _: Finding(OK, "well") for name in names})
    facts = {rank: Facts(f"n{rank}", {}, 0) for rank in (0, 1)}
    return place_in(seconds=0.2, ranks=Ranks(0, 0, 2), facts=facts)


def test_a_rank_that_tells_nothing_is_named_and_counted_out(of_two: Place) -> None:
    answered(of_two, 1, "versions", Finding(WARN, "few"))
    findings = preflight.checked_by_all(of_two)
    assert findings["versions"] == Finding(WARN, "rank 1 (n1): few")
    assert findings["attention"].found == "rank 1 (n1): not done"
    assert findings["loss"] == Finding(OK, "well")  # of all ranks that are left
    assert of_two.missing == [1]
    assert of_two.hear("begin loss", [0], 0) == {0: [1]}


def test_ranks_of_other_versions(place_in: MakePlace) -> None:
    place = place_in()
    place.facts[1] = replace(place.facts[0], host="n2", versions={"torch": "2"})
    versions = found("versions", place)
    assert versions.level == FAIL
    assert versions.found == "torch 1 on rank 0 (here); 2 on rank 1 (n2)"


def test_gpus_that_are_missing(place_in: MakePlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    none = found("gpus", place_in(gpus_expected=8))
    assert (none.level, none.found) == (FAIL, "no GPU, 8 expected")
    assert "CUDA_VISIBLE_DEVICES is :" in none.fix
    assert "gres" in none.fix
    assert found("gpus", place_in()) == Finding(WARN, "no GPU: gloo on CPUs", found("gpus", place_in()).fix)
    place = place_in()
    one = replace(place.facts[0], gpus=1, gpu="H100", memory=80 * 2**30)
    place.facts = {0: one, 1: one}
    assert found("gpus", place).found == "1 GPUs seen, 2 needed"
    place.facts = {0: one, 1: replace(one, host="n2", gpu="A100")}
    assert found("gpus", place).found == "H100 on rank 0 (here); A100 on rank 1 (n2)"
    place.facts = {0: one}
    assert found("gpus", place) == Finding(OK, "1 x H100, 80.00 GiB each")


def test_flash_attention_that_is_asked_for_and_not_installed(place_in: MakePlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "find_spec", lambda name: None)
    finding = found("attention", place_in("runtime.attention=flash_attention_2"))
    assert finding.level == FAIL
    assert finding.found.endswith("flash_attention_2 is not installed: pip install '.[gpu]' --no-build-isolation")
    assert found("attention", place_in()).found == "auto is sdpa, off by 0.0e+00 in float32"


def test_a_backend_that_computes_something_else(place_in: MakePlace, monkeypatch: pytest.MonkeyPatch) -> None:
    from longspec.models.attention import backends

    def doubled(*arguments: Any) -> torch.Tensor:
        return 2 * backends.BACKENDS[backends.SDPA](*arguments)

    monkeypatch.setitem(backends.BACKENDS, backends.FLASH, doubled)
    monkeypatch.setattr(backends, "choose", lambda *_: backends.FLASH)
    for precision in ("fp32", "bf16"):
        place = place_in(f"recipe.precision={precision}")
        monkeypatch.setitem(backends.BACKENDS, backends.FLASH, doubled)
        finding = found("attention", place)
        assert finding.level == FAIL
        assert finding.found.startswith("auto is flash_attention_2, off by 3.0e+00 in ")  # of the gradients
        monkeypatch.setitem(backends.BACKENDS, backends.FLASH, attend)
        assert found("attention", place).level == OK


def test_deepspeed_that_does_not_import(place_in: MakePlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "longspec.train.engine", raising=False)
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    finding = found("collective", place_in())
    assert finding.level == FAIL
    assert "deepspeed" in finding.found


def test_a_stage_that_does_not_fit(place_in: MakePlace) -> None:
    place = place_in("runtime.micro_batch=4")
    assert found("memory", place).level == OK
    place.facts[0] = replace(place.facts[0], host_memory=MIB)
    finding = found("memory", place)
    assert finding.level == FAIL
    assert "out of memory" in finding.found
    assert "runtime.micro_batch: 1 (then" in finding.found
    offloaded = place_in("runtime.deepspeed.offload_optimizer=cpu")
    items = estimate(preflight_job.setups(offloaded)["base"])
    needed = peak(items) + peak(items, on_host=True)
    for memory, level in ((needed, OK), (needed - 1, FAIL)):
        offloaded.facts[0] = replace(offloaded.facts[0], host_memory=memory)
        assert found("memory", offloaded).level == level
    assert "the ranks of a node take" in found("memory", offloaded).found


def test_ranks_that_cannot_share_a_global_batch(place_in: MakePlace) -> None:
    place = place_in(ranks=Ranks(0, 0, 3))
    finding = found("memory", place)
    assert finding.level == FAIL
    assert "cannot be shared equally by 3 processes" in finding.found


def test_a_folder_that_cannot_be_written(place_in: MakePlace, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    place = place_in(out=tmp_path / "file/out")
    assert found("disk", place).level == FAIL
    assert "cannot be written" in found("disk", place).found
    assert found("shared folder", place).found == "not checked: rank 0 has written no file, see the check of the disk"
    if os.geteuid() != 0:  # root may write anywhere
        (tmp_path / "closed").mkdir(mode=0o500)
        assert found("disk", place_in(out=tmp_path / "closed")).level == FAIL


def test_a_quota_and_a_full_disk(place_in: MakePlace, monkeypatch: pytest.MonkeyPatch) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, before[1]))
    try:
        finding = found("disk", place_in())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert finding.level == FAIL
    assert "64.00 MiB cannot be written" in finding.found
    place = place_in()
    assert found("disk", place).level == OK
    preflight_job.remove_shown(place)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000, total=2000))
    finding = found("disk", place)
    assert finding.level == FAIL
    assert "0.00 MiB free" in finding.found
    preflight_job.remove_shown(place)
    assert list(place.out.iterdir()) == []


def test_a_node_that_does_not_see_the_folder(place_in: MakePlace) -> None:
    first = place_in(seconds=2)
    first.facts[1] = replace(first.facts[0], host="n2")
    other = replace(first, ranks=Ranks(1, 0, 2))
    assert found("disk", first).level == OK
    assert found("shared folder", other) == found("shared folder", first) == Finding(OK, f"{first.out}, seen from here, n2")
    [shown] = first.out.iterdir()
    shown.write_text("an old version")
    assert "reads other than rank 0 wrote it" in found("shared folder", other).found
    preflight_job.remove_shown(first)
    finding = found("shared folder", other)
    assert finding.level == FAIL
    assert "is not there after 1 s" in finding.found
    merged = preflight.merged(first, {0: Finding(OK, "x"), 1: finding})
    assert merged.found.startswith("rank 1 (n2): ")


def test_a_target_whose_files_are_missing_or_torn(place_in: MakePlace) -> None:
    place = place_in()
    assert found("target", place).level == OK
    folder = Path(read_json(place.target)["path"])
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    assert "its manifest says" in found("target", place).found
    described(folder.parent)  # torn before it was fetched
    assert "model.safetensors: is damaged" in found("target", place).found
    weights.write_bytes(whole[:-1] + b"x")
    described(folder.parent)
    weights.write_bytes(whole)
    assert "SHA-256 differs" in found("target", place).found
    weights.unlink()
    finding = found("target", place)
    assert finding.level == FAIL
    assert "missing, though its manifest lists it" in finding.found
    place.target.unlink()
    assert "no such file" in found("target", place).found


def test_a_target_of_another_family(place_in: MakePlace) -> None:
    place = place_in()
    folder = Path(read_json(place.target)["path"])
    config = read_json(folder / "config.json") | {"model_type": "gpt2"}
    write_json(folder / "config.json", config)
    described(folder.parent)
    assert "model_type 'gpt2' is not supported" in found("target", place).found
    assert found("attention", place).level == WARN
    assert "see the check of the target" in found("memory", place).found


def templated(place: Place, template: str | None) -> Finding:
    """What the check finds of the tokenizer with another chat template."""
    folder = Path(read_json(place.tokenizer)["path"])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)
    described_tokenizer(folder.parent)
    return found("tokenizer", place)


def test_chat_templates_that_do_not_round_trip(place_in: MakePlace, monkeypatch: pytest.MonkeyPatch) -> None:
    place = place_in()
    assert found("tokenizer", place).level == OK
    upper = templated(place, "{% for turn in messages %}{{ turn.content | upper }}\n{% endfor %}")
    assert upper.level == FAIL
    assert upper.found.startswith("a chat of two turns cannot be laid out: ")
    refused = templated(place, "{{ raise_exception('no chats') }}")
    assert refused.level == FAIL
    assert "the chat template refuses it: no chats" in refused.found
    base = templated(place, None)
    assert base.level == WARN
    assert "chats cannot be tokenized" in base.found
    monkeypatch.setattr(preflight_job, "template_ids", lambda made: [5, 6, 7])
    other = templated(place, CHATML)
    assert other.level == FAIL
    assert "becomes other tokens than the template's, from token 0 on" in other.found


def test_a_tokenizer_of_another_target(place_in: MakePlace) -> None:
    place = place_in()
    folder = Path(read_json(place.tokenizer)["path"])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"<{number}>" for number in range(50)])
    tokenizer.save_pretrained(folder)
    described_tokenizer(folder.parent)
    finding = found("tokenizer", place)
    assert finding.level == FAIL
    assert "but the target embeds 275" in finding.found


def test_trackers_that_are_missing(place_in: MakePlace, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found("trackers", place_in()).found == "none; metrics.jsonl has every step"
    assert found("trackers", place_in("runtime.report_to=[tensorboard]")).found == "tensorboard online"
    monkeypatch.setattr(tracking, "is_installed", lambda name: name != "wandb")
    finding = found("trackers", place_in("runtime.report_to=[wandb]"))
    assert finding.level == FAIL
    assert "wandb is not installed: pip install" in finding.found


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home without any key."""
    for name in [name for name in os.environ if name.startswith(("WANDB_", "SWANLAB_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SWANLAB_ROOT", str(tmp_path / "home"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("keys")
def test_swanlab_without_a_key(place_in: MakePlace, monkeypatch: pytest.MonkeyPatch) -> None:
    online = place_in("runtime.report_to=[swanlab]")
    finding = found("trackers", online)
    assert finding.level == FAIL
    assert "swanlab has no key on this machine" in finding.found
    assert "set runtime.tracker_mode: offline" in finding.found
    monkeypatch.setenv("SWANLAB_API_KEY", "key")
    assert found("trackers", online) == Finding(OK, "swanlab online")
    assert found("trackers", place_in("runtime.report_to=[swanlab]", "runtime.tracker_mode=offline")).level == OK


@pytest.mark.usefixtures("keys")
def test_wandb_without_a_key(job: Path, tmp_path: Path) -> None:
    """In a process of its own, for wandb keeps the environment that it saw first."""
    runtime = load(job / "runtime.yaml", Runtime)
    assert load(job / "recipe.yaml", Recipe).stage == "base"
    OmegaConf.set_readonly(runtime, False)
    runtime.report_to = ["wandb"]
    write_text(tmp_path / "runtime.yaml", to_yaml(runtime))
    process = start(job, tmp_path / "out", f"--runtime={tmp_path / 'runtime.yaml'}", NETRC=str(tmp_path / "none"))
    code, text, levels = ended(process)
    assert code == 1
    assert levels["trackers"] == FAIL
    assert "wandb has no key on this machine: run `wandb login`, set WANDB_API_KEY, or set" in text


def test_a_check_that_hangs_or_raises_is_a_finding(place_in: MakePlace) -> None:
    hung = preflight.limited(lambda _: time.sleep(30), place_in(), 0.2)  # type: ignore[func-returns-value]
    assert hung is not None
    assert (hung.level, hung.found) == (FAIL, "no end after 0 s")

    def wrong(_: Place) -> Finding:
        raise KeyError("path")

    assert preflight.limited(wrong, place_in(), 5) == Finding(FAIL, "KeyError: 'path'")


def commands(workflow: Workflow, *arguments: str) -> dict[str, str]:
    """The planned preflight's command, by its run."""
    planned = workflow.output("-n", "preflight", *arguments)
    found = re.findall(r"^ +output: results/(\w+)/preflight\.json$.*?Shell command: (.*?)\n", planned, re.MULTILINE | re.DOTALL)
    return dict(found)


def test_the_rule_checks_all_stages_of_each_run_as_they_will_be_started(tmp_path: Path, root: Path) -> None:
    workflow = copy_to(tmp_path, root)
    (command,) = commands(workflow).values()
    stages = [f"results/demo/sinkpi-slicing/{stage}" for stage in ("base", "long", "longcot")]
    for section in ("recipe", "runtime"):
        assert f"--{section} {' '.join(f'{stage}/{section}.yaml' for stage in stages)} --" in command
    for part in (
        "launch --nodes 1 --ranks 1 ",
        "--log logs/preflight/demo.log -- longspec.cluster preflight ",
        "--target models/demo/target_manifest.json --tokenizer models/demo/tokenizer_manifest.json",
        "--gpus-expected 0 --out results/demo --report results/demo/preflight.json",
    ):
        assert part in command
    (command,) = commands(workflow, "--set-resources", "preflight_run:gres='nvme:2,gpu:a100_80gb:2'").values()
    assert "--gpus-expected 2 " in command
    assert "preflight" not in workflow.output("-n", "final_draft", "--quiet", "rules")


def test_what_was_found_well_is_checked_again(tmp_path: Path, root: Path) -> None:
    """With all that it needs there, a second call runs the job again; one that fails is not tried a second time."""
    workflow = copy_to(tmp_path, root)
    (tmp_path / "src/longspec/cluster/launch.py").write_text(
        "from pathlib import Path\n\n\ndef main(argv):\n"
        "    Path(argv[-1]).write_text('report')\n    return int(Path('sick').exists())\n"
    )
    for name in ("target", "tokenizer"):
        write_text(tmp_path / f"models/demo/{name}_manifest.json", "{}")
    until = ["--allowed-rules", "preflight", "preflight_run", "stage_config"]
    for _ in range(2):
        assert "rule preflight_run:" in workflow.output("preflight", "--cores=1", *until)
        assert (tmp_path / "results/demo/preflight.json").read_text() == "report"
    (tmp_path / "sick").touch()
    done = workflow.call("preflight", "--cores=1", "--retries=3", *until)
    assert done.returncode == 1
    assert len(re.findall(r"^(?:local)?rule preflight_run:$", done.stdout + done.stderr, re.MULTILINE)) == 1
