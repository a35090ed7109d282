"""GLIDE drafts in an unmodified vLLM with the plugin of plugins/vllm: what the draft says in each round, and the text.

The other side is our training forward, with the lag of each drafted token.
"""

import argparse
import dataclasses
import json
import subprocess
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, MistralConfig, Qwen3Config

from longspec.atomic_files import read_json, write_json
from longspec.draft.folder import config_of, write_draft
from longspec.draft.layouts import write_layout
from longspec.methods.glide.attach import attach
from longspec.methods.glide.layer import GlideLayer, published_layout
from longspec.methods.glide.method import METHOD
from longspec.methods.glide.settings import Draft
from longspec.methods.glide.trainer import Glide
from longspec.models.attention.visibility import Visibility
from tests.measure.demo_draft import Measured, assert_as_ours
from tests.measure.vllm_glide import Job, Pass
from tests.targets import SHAPES, last_states

ROOT = Path(__file__).parents[2]
NEEDED = (".venv-serve/vllm/.stamp", "results/demo/sinkpi-slicing/final_draft/provenance.json")
MISSING = [name for name in NEEDED if not (ROOT / name).is_file()]
pytestmark = [pytest.mark.serve, pytest.mark.skipif(bool(MISSING), reason=f"{MISSING} missing: make test-serve")]
PYTHON, PROGRAM = ROOT / ".venv-serve/vllm/bin/python", Path(__file__).with_name("vllm_glide.py")
TARGET, DRAFT = ROOT / "models/demo/target", ROOT / "results/demo/sinkpi-slicing/final_draft"
CLOSE = 1e-4
SHAPE = SHAPES | {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 3}
SHAPE |= {"initializer_range": 0.1, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}
SHAPE |= {"eos_token_id": None, "bos_token_id": None}
# The demo's target is a Qwen2.
FAMILIES = {
    "llama": LlamaConfig(**SHAPE),
    "mistral": MistralConfig(**SHAPE, sliding_window=None),
    "qwen3": Qwen3Config(**SHAPE, head_dim=64),
}
WINDOW = 8  # of the random drafts: in prompts of a few tokens another one is then seen
Found = dict[str, Any]


def run(folder: Path, job: Job) -> list[Found]:
    """What each pass of a job brought."""
    write_json(folder / "job.json", asdict(job))
    out = folder / "found.pt"
    done = subprocess.run([PYTHON, PROGRAM, folder / "job.json", out], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    return torch.load(out, weights_only=True)


@torch.no_grad()
def expected(glide: Glide, keys_values: tuple[Tensor, Tensor], text: list[int], drafts: list[int]) -> Tensor:
    """Our logits of each drafted token, [K, V]; text: up to the token that the target has just sampled."""
    whole, steps = torch.tensor([text + drafts[:-1]]), len(drafts)
    embedded = glide.model.embed_tokens(whole)
    cos, sin = glide.model.rotary_emb(embedded, torch.arange(whole.shape[1])[None])
    own = glide.draft_model.own_keys_values(embedded, (cos, sin))
    # Of the text before its last token. Nothing may look at the zeros behind.
    keys, values = (
        torch.cat([x[:, :, : len(text) - 1], torch.zeros_like(x[:, :, :1]).expand(-1, -1, steps, -1)], 2) for x in keys_values
    )
    rows = []
    for step in range(steps):
        hidden = glide.draft_model(
            embedded[:, -steps:],
            (cos[:, -steps:], sin[:, -steps:]),
            own,
            (keys, values),
            Visibility(window=glide.draft_settings.window),
            Visibility(lag_B=torch.tensor([step + 1])),
        )
        rows.append(glide.lm_head(hidden[0, step]))
    return torch.stack(rows)


def differences(glide: Glide, prompts: list[list[int]], found: Found) -> list[float]:
    """How far each round's logits are from ours, at most, in absolute value."""
    numbers = {request: number for number, request in enumerate(found["requests"])}
    states: dict[int, tuple[Tensor, Tensor]] = {}
    away = []
    for each in found["rounds"]:
        number = numbers[each["request"].split("-")[0]]  # vLLM makes the name its own
        text = prompts[number] + found["texts"][number]
        end = each["position"] + 1
        if not len(prompts[number]) < end <= len(text):  # a part of a prompt, or behind the last token that was asked for
            continue
        if number not in states:
            with torch.no_grad():
                keys, values, _ = last_states(glide, torch.tensor([text]), torch.arange(len(text))[None])
            states[number] = (keys, values)
        ours = expected(glide, states[number], text[:end], each["drafts"])
        away.append(float((torch.stack(each["logits"]) - ours).abs().max()))
    return away


def prompts_of(lengths: list[int]) -> list[list[int]]:
    """Stretches of Python's own library, as the demo was trained on it; each begins elsewhere."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    ids = [id for file in (argparse, dataclasses) for id in tokenizer(Path(file.__file__).read_text())["input_ids"]]
    return [ids[31 * number :][:length] for number, length in enumerate(lengths)]


LENGTHS = [1, 2, 3, 9, 33, 64, 120, 200, 510, 511, 512, 513, 514, 700, 1023, 1500, 2100, 4096]
NEW = 120
GREEDY = {"temperature": 0, "max_tokens": NEW}
ENGINE = {"max_model_len": 4352, "max_num_batched_tokens": 4096}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[int]], Found]:
    """The demo's prompts, and vLLM's own text of them without a draft."""
    prompts = prompts_of(LENGTHS)
    greedy = GREEDY | {"logprobs": 2}
    return prompts, run(tmp_path_factory.mktemp("plain"), Job(str(TARGET), None, 0, [Pass(prompts, greedy)], ENGINE))[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's draft in vLLM's layout."""
    out = tmp_path_factory.mktemp("demo") / "vllm"
    write_layout(DRAFT, "vllm", out)
    return out


def assert_same_texts(plain: Found, found: Found) -> None:
    """Equal up to a place at which vLLM's own two likeliest tokens are a near-tie."""
    for number, (own, other) in enumerate(zip(plain["texts"], found["texts"], strict=True)):
        place = next((place for place, (a, b) in enumerate(zip(own, other, strict=False)) if a != b), None)
        assert place is None or plain["margins"][number * NEW + place] < CLOSE, (number, place)
        assert len(own) == len(other)


def test_every_drafted_step_is_ours_on_prompts_of_1_to_4096_tokens(
    plain: tuple[list[list[int]], Found], folder: Path, tmp_path: Path
) -> None:
    """16 requests at once; the second pass finds all prompts in the prefix cache."""
    prompts, own = plain
    glide = attach(str(TARGET), str(DRAFT), dtype=torch.float32)
    passes = [Pass(prompts, GREEDY), Pass(prompts, GREEDY)]
    found = run(tmp_path, Job(str(TARGET), str(folder), 4, passes, ENGINE | {"max_num_seqs": 16}))
    assert sum(map(len, own["texts"])) >= 2000
    for each in found:
        assert_same_texts(own, each)
        away = differences(glide, prompts, each)
        assert len(away) > 400
        assert all(each_away <= CLOSE for each_away in away)  # max passes over NaN


@pytest.mark.parametrize(
    ("engine", "tokens", "preempted"),
    [
        ({"max_num_seqs": 4, "max_num_batched_tokens": 64}, 7, False),  # prompts in parts
        # The longest text ends where the positions do.
        ({"max_num_seqs": 16, "num_gpu_blocks_override": 14, "max_model_len": 1023 + NEW}, 1, True),
    ],
    ids=["four, in parts", "preempted"],
)
def test_text_and_steps_do_not_hang_on_the_schedule(
    plain: tuple[list[list[int]], Found], folder: Path, tmp_path: Path, engine: dict[str, Any], tokens: int, preempted: bool
) -> None:
    prompts, own = plain
    prompts = [prompt for prompt in prompts if len(prompt) + NEW <= (ENGINE | engine)["max_model_len"]]
    own = own | {"texts": own["texts"][: len(prompts)]}
    glide = attach(str(TARGET), str(DRAFT), dtype=torch.float32)
    [found] = run(tmp_path, Job(str(TARGET), str(folder), tokens, [Pass(prompts, GREEDY)], ENGINE | engine))
    assert_same_texts(own, found)
    away = differences(glide, prompts, found)
    assert all(each <= CLOSE for each in away)
    assert (found["counters"]["preemptions"] > 0) == preempted


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def random_pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A random target, a random draft beside it whose numbers are large enough for a fault to show, and its layout for vLLM."""
    torch.manual_seed(0)
    place, config = tmp_path_factory.mktemp(request.param), FAMILIES[request.param]
    target = AutoModelForCausalLM.from_config(config).eval()
    target.save_pretrained(place / "target")
    settings = Draft(window=WINDOW, anchors="off", lag_mode="random", final_norm=request.param == "qwen3")
    layer = GlideLayer(config, final_norm=settings.final_norm)
    for name, parameter in layer.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.1)
    write_draft(
        place / "draft",
        published_layout(layer.state_dict()),
        config_of(METHOD, settings, str(place / "target"), "build", "base"),
    )
    write_layout(place / "draft", "vllm")
    return place / "target", place / "draft", place / "draft/vllm"


def test_each_family_and_each_fault(random_pair: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """Clip or window set wrong by one: the logits say so, whatever the text is."""
    target, draft, folder = random_pair
    glide = attach(str(target), str(draft), dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(512, (length,), generator=generator).tolist() for length in (1, 2, 7, 8, 9, 10, 40, 300)]
    faults = ["", "clip+1", "clip-1", "window+1", "window-1"]
    passes = [Pass(prompts, {"temperature": 0, "max_tokens": 40}, fault) for fault in faults]
    engine = {"max_model_len": 1024, "enable_prefix_caching": False}
    found = run(tmp_path, Job(str(target), str(folder), 4, passes, engine))
    right, *wrong = [differences(glide, prompts, each) for each in found]
    assert len(right) > 200
    assert found[0]["scales"]
    assert all(each <= CLOSE for each in right)
    for fault, away, each in zip(faults[1:], wrong, found[1:], strict=True):
        # A fault may read memory that nobody has written: NaN, which is above nothing and below nothing, differs too.
        assert not all(each_away <= 1e-2 for each_away in away), fault
        assert each["texts"] == found[0]["texts"], fault


SAMPLES, LEAST = 2000, 8.0


@torch.no_grad()
def cells_of(target: Any, prompt: list[int], temperature: float, tokens: int) -> dict[tuple[int, ...], float]:
    """The target's own probabilities of texts of so many tokens, of those that are to be expected LEAST times."""
    found = {(): 1.0}
    for _ in range(tokens):
        logits = target(torch.tensor([prompt + list(text) for text in found])).logits[:, -1].double()
        probabilities = (logits / temperature).softmax(-1).tolist()
        found = {
            (*text, token): before * p
            for (text, before), row in zip(found.items(), probabilities, strict=True)
            for token, p in enumerate(row)
            if SAMPLES * before * p >= LEAST
        }
    return found


def chi_square(cells: dict[tuple[int, ...], float], texts: list[list[int]]) -> float:
    """The probability of texts as far from the cells as these, or farther."""
    counted = Counter(map(tuple, texts))
    counts = [*(counted[text] for text in cells), len(texts) - sum(counted[text] for text in cells)]
    wanted = [len(texts) * p for p in (*cells.values(), 1 - sum(cells.values()))]
    return float(chisquare(counts, wanted).pvalue)


def test_sampled_text_has_the_targets_distribution_and_vllms_own_has_not(folder: Path, tmp_path: Path) -> None:
    """Three tokens of which the draft proposes two; on CPUs by the plugin's remedy, without which the text is another."""
    target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    prompt = prompts_of([401])[0][-24:]  # behind which few tokens are likely
    settings = [{"temperature": temperature, "max_tokens": 3} for temperature in (1.0, 0.7, 0.7)]
    faults = ["", "", "vLLM's own sampling"]
    passes = [Pass([prompt] * SAMPLES, each, fault, keep=0) for each, fault in zip(settings, faults, strict=True)]
    found = run(tmp_path, Job(str(TARGET), str(folder), 2, passes, {"max_model_len": 256, "max_num_seqs": 64}, "probabilistic"))
    cells = [cells_of(target, prompt, each["temperature"], 3) for each in settings]
    likely = [chi_square(each, one["texts"]) for each, one in zip(cells, found, strict=True)]
    assert min(map(len, cells)) >= 12
    assert min(likely[:2]) > 1e-3
    assert likely[2] < 1e-9
    assert found[0]["counters"]["num_accepted_tokens"] > SAMPLES / 2


def test_what_the_plugin_cannot_serve_is_refused_and_what_gpus_read_is_clipped() -> None:
    """By its own checks, which run as vLLM builds the draft beside the loaded target."""
    program = PROGRAM.with_name("vllm_refusals.py")
    done = subprocess.run([PYTHON, program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert [said.pop(name) for name in ("right", "stretched", "asked for", "plain layers", "same dtype")] == [""] * 5
    # By the builders of the backends for GPUs: the target has keys of 299, 1 and no tokens, however many are drafted.
    assert said.pop("flash") == said.pop("triton") == [[299, 1, 0, 299]] * 3
    named = {
        "v2": "VLLM_USE_V2_MODEL_RUNNER=0",
        "multimodal": "multimodal",
        "pipeline": "--pipeline-parallel-size",
        "context": "--decode-context-parallel-size",
        "fast": "--kv-sharing-fast-prefill",
        "draft_tp": "draft_tensor_parallel_size",
        "cache": "kv_cache_dtype",
        "lora": "--enable-lora",
        "positions": "--layout vllm",
        "skipped": "layers.2: its cache is auto, that of layers.0 is fp8; leave out --kv-cache-dtype-skip-layers",
        "method": '"method": "draft_model"',
        "target": "vocab_size: the draft was made for a target of 512, this one has 600",
        "rotation": "rope_theta: the draft was made for a target of 10000.0, this one has 500000.0",
        "sliding": "model.layers.1.self_attn.attn: slides a window of 64",
        "mixed": "model.layers.0.self_attn.attn: slides a window of 64",
        "other layers": "is a OtherAttention",
        "backend": "--attention-backend FLASH_ATTN",
    }
    of_draft, of_sampling = said.pop("warned")
    assert "tested with vLLM 0.32.0, this is 0.99.0" in of_draft
    assert "vLLM 0.99.0 is left as it is" in of_sampling
    assert said.keys() == named.keys()
    for name, words in named.items():
        assert words in said[name], name


def test_an_evaluation_through_vllm_keeps_what_ours_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    recipe = DRAFT.parent / str(read_json(DRAFT / "config.json")["stage"]) / "recipe.yaml"
    files = (ROOT / "models/demo/target_manifest.json", DRAFT, recipe, ROOT / "data/raw/stdlib/manifest.json")
    measured = Measured(*files, None, contexts=(64, 448))
    theirs = measured.lines(tmp_path / "theirs.jsonl", "--engine", "vllm", "--serve-python", str(PYTHON))
    assert_as_ours(theirs, measured.lines(tmp_path / "ours.jsonl"), "vllm", 20 * 36)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("engine", [{}, {"enforce_eager": False}, {"kv_cache_dtype": "fp8"}], ids=["eager", "graphs", "fp8"])
@pytest.mark.parametrize("backend", ["FLASH_ATTN", "TRITON_ATTN"])
def test_a_clip_off_by_one_is_seen_on_gpus_too(
    random_pair: tuple[Path, Path, Path], tmp_path: Path, backend: str, engine: dict[str, Any]
) -> None:
    """In bfloat16, whose logits are a little off ours everywhere."""
    target, draft, folder = random_pair
    glide = attach(str(target), str(draft), dtype=torch.float32)
    prompts = [list(range(length)) for length in (1, 8, 40, 300)]
    passes = [Pass(prompts, {"temperature": 0, "max_tokens": 40}, fault) for fault in ("", "clip+1", "clip-1")]
    more = {"max_model_len": 1024, "enable_prefix_caching": False, "dtype": "bfloat16", "attention_backend": backend}
    found = run(tmp_path, Job(str(target), str(folder), 4, passes, more | engine))
    right, *wrong = [torch.tensor(differences(glide, prompts, each)).median() for each in found]
    assert all(right < each / 4 for each in wrong)
