"""A draft folder in transformers' own generate, the same by a Python call and as docs/generate.md shows, and vocabularies."""

import io
import re
import shutil
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BatchEncoding, GenerationConfig, LlamaConfig, TextStreamer

from longspec.atomic_files import read_json, write_json
from longspec.decode import speculate
from longspec.decode.generate import generate, load_drafter
from longspec.decode.lookup import LookupDrafter
from longspec.draft.folder import GENERATE as FILE
from longspec.draft_vocabulary import DraftVocabulary, tokenizer_hash_of
from longspec.methods import chosen_vocabulary
from tests.cli import small_draft
from tests.corpus import Corpus
from tests.decode.models import make_target
from tests.draft.eagle3_drafts import make_draft
from tests.methods.test_attach import save_draft, save_target
from tests.refusals import refused
from tests.targets import VOCABULARY

NEW = 30
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers copies the draft folders' code to a place of this test's own."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of GLIDE, or of the method that a test asks for."""
    path = tmp_path_factory.mktemp("pair")
    if getattr(request, "param", "glide") == "glide":
        save_draft(save_target("qwen2", path / "target"), path / "draft")
    else:
        made = make_target(7, LlamaConfig, vocab_size=VOCABULARY, num_hidden_layers=3).float()
        make_draft(path, made.config, layers=[0, 1, 2], sliding_window=9)
        made.save_pretrained(path / "target")
    return path / "draft"


@pytest.fixture
def target(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder.parent / "target", dtype=torch.float64)


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    """Three texts, padded on the left as generate wants them."""
    ids = torch.randint(1, VOCABULARY, (3, 9))
    mask = torch.tensor([[1] * 9, [0] * 4 + [1] * 5, [0] * 8 + [1]])
    return {"input_ids": ids * mask, "attention_mask": mask}


def by_folder(target, folder, **arguments):
    return target.generate(custom_generate=str(folder), trust_remote_code=True, draft=folder, **arguments)


def by_call(target, folder, **arguments):
    return generate(target, draft=folder, **arguments)


@pytest.mark.parametrize(("folder", "way"), [("glide", by_folder), ("eagle3", by_call)], indirect=["folder"])
def test_it_returns_what_generate_returns(way, target, folder: Path, batch) -> None:
    """Rows padded and ended alike; eos, stop strings and lengths from arguments, a GenerationConfig or the target's own."""
    plain = target.generate(**batch, **GREEDY)
    assert torch.equal(way(target, folder, **batch, **GREEDY), plain)
    eos = [int(plain[0, 9 + 3]), int(plain[1, 9 + 12])]
    for settings in ({"eos_token_id": eos}, {"eos_token_id": eos[0]}, {"cache_implementation": "dynamic"}):
        assert torch.equal(way(target, folder, **batch, **GREEDY | settings), target.generate(**batch, **GREEDY | settings))
    target.generation_config.eos_token_id = eos
    wanted = target.generate(**batch, **GREEDY)
    assert wanted.shape[1] < 9 + NEW or (wanted == 0).any()
    assert torch.equal(way(target, folder, **batch, **GREEDY), wanted)
    config = GenerationConfig(**GREEDY)
    assert torch.equal(way(target, folder, **batch, generation_config=config), wanted)
    row = {"inputs": batch["input_ids"][:1], "shape": 3}
    assert torch.equal(way(target, folder, **row, **GREEDY), target.generate(row["inputs"], **GREEDY))


def test_settings_mean_what_they_mean_in_generate(target, folder: Path, batch) -> None:
    """Ends of text as tensors, and max_length, which counts the padded prompt; as arguments and in a configuration."""
    plain, drafter = target.generate(**batch, **GREEDY), load_drafter(target, folder)
    ends = [int(plain[0, 9 + 3]), int(plain[1, 9 + 12])]
    whole = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for settings in (
        GREEDY | {"eos_token_id": torch.tensor(ends), "pad_token_id": torch.tensor(0)},
        GREEDY | {"eos_token_id": torch.tensor(ends[0]), "pad_token_id": None},
        GREEDY | {"eos_token_id": [torch.tensor(token) for token in ends]},
        whole | {"max_length": 20},
        whole | {"max_length": 20, "max_new_tokens": 4},
    ):
        for given in (settings, {"generation_config": GenerationConfig(**settings)}):
            wanted = target.generate(**batch, **given)
            assert torch.equal(generate(target, draft=drafter, **batch, **given), wanted)


@pytest.mark.parametrize(
    ("settings", "pads"), [({}, 4), ({"eos_token_id": 3}, 0), ({"pad_token_id": None}, 4), ({"eos_token_id": [3, 0]}, 4)]
)
def test_padding_without_a_mask_is_told_as_in_generate(target, folder: Path, settings, pads: int) -> None:
    """By the padding token, where it ends no texts; else it is a token as any other, before the text and within it."""
    drafter = load_drafter(target, folder)
    ids = torch.randint(4, VOCABULARY, (1, 9))
    ids[0, :pads] = 0
    for row in (ids, ids.roll(2)):
        wanted = target.generate(row, **GREEDY | settings)
        assert torch.equal(generate(target, row, draft=drafter, **GREEDY | settings), wanted)
    both = torch.cat([ids, torch.randint(4, VOCABULARY, (1, 9))])
    if settings in ({}, {"eos_token_id": 3}):
        wanted = target.generate(both, **GREEDY | settings)
        assert torch.equal(generate(target, both, draft=drafter, **GREEDY | settings), wanted)


@pytest.mark.parametrize(("folder", "way"), [("eagle3", by_folder), ("glide", by_call)], indirect=["folder"])
def test_a_streamer_gets_the_text(way, target, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    letters = SimpleNamespace(decode=lambda ids, **_: "".join(chr(97 + int(token) % 26) for token in ids))
    streamed = TextStreamer(letters, skip_prompt=True)
    out = way(target, folder, inputs=torch.tensor([[5, 6, 7]]), streamer=streamed, **GREEDY)
    assert capsys.readouterr().out.strip() == letters.decode(out[0, 3:])


def test_sampled_texts_are_drawn_from_the_warped_law(target, folder: Path) -> None:
    """Settings arrive: with one token left in, any temperature is greedy; else texts follow the generator."""
    ids = torch.tensor([[5, 6, 7]])
    sampled = GREEDY | {"do_sample": True, "temperature": 3.0, "top_k": 0, "top_p": 1.0}
    greedy = target.generate(ids, **GREEDY)
    drafter = load_drafter(target, folder)
    for settings in ({"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-6}):
        assert torch.equal(generate(target, ids, draft=drafter, **sampled | settings), greedy)
    draws = [
        generate(target, ids, draft=drafter, num_return_sequences=3, generator=torch.Generator().manual_seed(seed), **sampled)
        for seed in (1, 1, 2)
    ]
    assert draws[0].shape == (3, 3 + NEW)
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert len(set(map(tuple, draws[0].tolist()))) == 3


def test_nothing_that_changes_the_text_is_passed_over(target, folder: Path, batch) -> None:
    ids = batch["input_ids"][:1]
    faults = [
        ({"repetition_penalty": 1.3}, ("RepetitionPenaltyLogitsProcessor", "generation_config")),
        ({"do_sample": True, "min_p": 0.1}, ("MinPLogitsWarper", "generation_config")),
        ({"encoder_no_repeat_ngram_size": 2}, ("EncoderNoRepeatNGramLogitsProcessor",)),
        ({"cache_implementation": "static"}, ("cache_implementation", "not done")),
        ({"use_cache": False}, ("use_cache", "not done")),
        ({"inputs": ids}, ("inputs, input_ids",)),
        ({"input_ids": ids.double()}, ("input_ids", "int64 or int32")),
        ({"num_beams": 2}, ("beam_search", "do_sample")),
        ({"penalty_alpha": 0.6, "top_k": 4}, ("penalty_alpha", "leave it out")),
        ({"output_hidden_states": True}, ("output_hidden_states", "not done")),
        ({"max_new_tokens": None}, ("max_new_tokens", "by max_length")),
        ({"max_new_tokens": None, "max_length": 9}, ("max_new_tokens, max_length", "for 0")),
        ({"return_dict_in_generate": True}, ("return_dict_in_generate",)),
        ({"max_time": 1.0, "token_healing": True}, ("max_time, token_healing", "not done")),
        ({"logits_processor": [1]}, ("logits_processor", "not taken")),
        ({"synced_gpus": True}, ("synced_gpus", "not taken")),
        ({"input_ids": batch["input_ids"], "pad_token_id": None}, ("attention_mask", "pad_token_id")),
        ({"attention_mask": batch["attention_mask"]}, ("attention_mask", "is [3, 9]", "are [1, 9]")),
        ({"input_ids": None}, ("input_ids", "int64")),
    ]
    for wrong, told in faults:
        with refused(*told):
            by_folder(target, folder, **{"input_ids": ids} | GREEDY | wrong)
    with refused("streamer", "are 3"):
        generate(target, draft=folder, streamer=object(), **batch, **GREEDY)
    with pytest.raises(TypeError, match="draft"):
        target.generate(ids, custom_generate=str(folder), trust_remote_code=True, **GREEDY)


def test_the_targets_generation_config_is_overruled_as_its_refusal_says(target, folder: Path) -> None:
    ids = torch.tensor([[5, 6, 7]])
    wanted = target.generate(ids, **GREEDY)
    target.generation_config.use_cache = False
    with refused("use_cache", "use_cache=True"):
        generate(target, ids, draft=folder, **GREEDY)
    assert torch.equal(generate(target, ids, draft=folder, use_cache=True, **GREEDY), wanted)


def test_what_apply_chat_template_returns_is_taken_whole(target, folder: Path, batch) -> None:
    given, drafter = BatchEncoding(batch), load_drafter(target, folder)
    wanted = target.generate(**given, **GREEDY)
    assert torch.equal(generate(target, given, draft=drafter, **GREEDY), wanted)
    with refused("token_type_ids", "not taken"):
        generate(target, {**given, "token_type_ids": given["input_ids"]}, draft=drafter, **GREEDY)


def test_without_the_package_the_folders_code_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "longspec.decode.generate", None)
    with refused("import of longspec.decode.generate", "(pip install .)", kind=ModuleNotFoundError):
        exec((folder / FILE).read_text(), {})


def test_stop_strings_are_those_of_generate(corpus: Corpus) -> None:
    """Of a tokenizer of bytes, whose characters and strings begin in one token and end in another, or in the prompt."""
    tokenizer = AutoTokenizer.from_pretrained(read_json(corpus.tokenizer)["path"])
    target = make_target(3, vocab_size=len(tokenizer), initializer_range=0.2)
    prompt = tokenizer("the red fox é", return_tensors="pt").input_ids
    greedy = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0, "tokenizer": tokenizer}
    written = tokenizer.decode(target.generate(prompt, **greedy)[0], clean_up_tokenization_spaces=False)
    strings = [written[place : place + size] for place in range(10, 40, 3) for size in (1, 2, 4)]
    strings = [string for string in strings if "\ufffd" not in string]
    lengths = set()
    for string in strings:
        wanted = target.generate(prompt, stop_strings=[string], **greedy)
        found = generate(target, prompt, draft=LookupDrafter(), stop_strings=[string], **greedy)
        assert torch.equal(found, wanted), string
        lengths.add(wanted.shape[1])
    assert len(strings) > 10
    assert len(lengths) > 4


SAID = (0, 2, 7, 11, 30, 44, 45, 60)


@pytest.fixture
def vocabulary(tmp_path: Path) -> Path:
    """The file of the tokens that a draft can say."""
    DraftVocabulary(SAID, VOCABULARY, "", {"all": 1.0}).write(tmp_path / "draft_vocabulary_8.json")
    return tmp_path / "draft_vocabulary_8.json"


def test_a_glide_draft_takes_the_file_of_a_vocabulary(target, folder: Path, vocabulary: Path) -> None:
    """By name of generate's argument, through the folder's own code and by a Python call, and by load_drafter."""
    drafter = load_drafter(target, folder, vocabulary)
    assert drafter.proposed == len(SAID)
    assert torch.equal(drafter.head_VH, target.lm_head.weight[list(SAID)])
    row = {"inputs": torch.tensor([[5, 6, 7]]), **GREEDY}
    named = row | {"draft_vocabulary": str(vocabulary), "shape": (8, 3)}
    for way in (by_folder, by_call):
        assert torch.equal(way(target, folder, **named), target.generate(**row))
    with refused("shape (9,)", "level 1", "9 nodes", "1 to 8", "vocabulary of 8"):
        by_call(target, folder, **named | {"shape": (9,)})
    with refused(f"draft_vocabulary: {vocabulary}", "load_drafter"):
        by_call(target, drafter, **named)


def test_vocabularies_that_do_not_fit_are_named(folder: Path, vocabulary: Path, tmp_path: Path) -> None:
    assert chosen_vocabulary("glide", None) is None
    assert chosen_vocabulary("eagle3", None) is None
    with refused(f"draft_vocabulary: {vocabulary}", "eagle3"):
        chosen_vocabulary("eagle3", vocabulary)
    shutil.copytree(folder.parent / "target", tmp_path / "target")
    write_json(tmp_path / "target/tokenizer.json", {})
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    own = {"tokenizer": tokenizer_hash_of(tmp_path / "target")}
    for changed, field in (({"size": 98}, "size"), ({"tokenizer": "other"}, "tokenizer"), ({"ids": [3, 2]}, "ids")):
        write_json(tmp_path / "other.json", read_json(vocabulary) | own | changed)
        with refused(f"{tmp_path}/other.json: {field}"):
            load_drafter(target, folder, tmp_path / "other.json")


def test_the_lines_of_its_page_run_and_say_how_many_tokens_a_round_brings(
    root: Path, tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/generate.md as it stands, line by line, on a small target and a draft in the places that it names."""
    monkeypatch.chdir(tmp_path)
    small_draft.save(Path("models/demo/target"), Path("results/demo/sinkpi-slicing/final_draft"), corpus)
    blocks = re.findall(r"```python\n(.*?)```", (root / "docs/generate.md").read_text(), re.DOTALL)
    assert len(blocks) == 3
    forwards: list[int] = []
    forward = speculate._Run.forward
    monkeypatch.setattr(speculate._Run, "forward", lambda *given: forwards.append(1) or forward(*given))
    told: dict[str, Any] = {}  # the names that the blocks leave
    with redirect_stdout(io.StringIO()) as printed:
        for block in blocks:
            exec(block, told)
            assert forwards, "the draft is used"
            forwards.clear()
    assert told["out"].shape[0] == 1
    assert told["row"].new_tokens >= 63
    assert re.search(r"^[\d.]+ tokens a round, kept in each: \[", printed.getvalue(), re.MULTILINE)
