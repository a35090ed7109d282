"""Fixtures of all tests."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import pytest

from longspec.config import Build
from tests.corpus import LENGTH, Corpus, questions, sentences, write_raw
from tests.data.hub_standin import Hub, running

OF_MINUTES = ["test_vllm_glide", "test_made_up_method", "test_job", "test_sbatch", "test_elastic", "test_method_jobs"]
OF_MINUTES += ["test_gpu", "test_partitioned", "test_demo", "test_speculate"]


def pytest_configure() -> None:
    """A shell that starts the tests in the background has them, and all jobs that they start, ignore Ctrl-C."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of minutes come first, then slow tests: no worker ends alone with one. Without a GPU its tests skip themselves."""
    places = {name: place for place, name in enumerate(OF_MINUTES)}
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (places.get(item.path.stem, len(places)), item.path not in slow))
    for_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if for_gpu:
        import torch

        if not torch.cuda.is_available():
            for item in for_gpu:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root."""
    return Path(__file__).parents[1]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Rows of 48 tokens that hold one or several documents, made by the verbs' own functions."""
    from longspec.data import tokenize
    from longspec.data.pack import packing
    from longspec.target import tokenizer

    root = tmp_path_factory.mktemp("corpus")
    mixture = [{"dataset": "tiny", "sequence_length": LENGTH, "rows": 8, "steps": 40}]
    build = Build(vocabulary=275, hidden=32, layers=2, heads=4, intermediate=64, mixture=mixture, lr=1e-2)
    raw = write_raw(root / "tiny", sentences(300))
    manifest = root / "model" / "tokenizer_manifest.json"
    tokenizer.make(build, [raw], manifest)
    packed = {}
    for name, source, collation in (("texts", raw, "base"), ("answers", write_raw(root / "chats", questions(200)), "longcot")):
        shard = root / "tokens" / name / "000.json"
        tokenize.make(source, manifest, 0, 1, shard)
        packed[name] = root / "packed" / name / "manifest.json"
        packing.make([shard], LENGTH, collation, "split", packed[name])
    return Corpus(build, raw, manifest, packed["texts"], packed["answers"])


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A stand-in for the hub, asked without a token."""
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    with running() as started:
        monkeypatch.setenv("HF_ENDPOINT", started.address)
        yield started


@pytest.fixture
def longspec(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """The command `longspec` with some arguments, in this process: its exit status, and all that it prints."""
    from longspec.cli.__main__ import main

    def called(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        told = capsys.readouterr()
        return int(ended.value.code or 0), told.out + told.err

    return called


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are made, and saved empty: their drawing takes four fifths of a page's time, and tests of pages have it."""
    from matplotlib.figure import Figure

    def savefig(figure: Figure, buffer: TextIO, **_: object) -> None:
        buffer.write('<svg viewBox="0 0 1 1"></svg>')

    monkeypatch.setattr(Figure, "savefig", savefig)
