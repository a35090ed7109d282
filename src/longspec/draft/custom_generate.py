"""The draft folder's `custom_generate/generate.py`, by which transformers' generate decodes with the draft.

transformers copies the file to a cache of its own and runs it there, without a word of the folder it came from.
"""

from pathlib import Path

from longspec.atomic_files import write_text

FILE = "custom_generate/generate.py"
# transformers reports a missing import as a missing package of that name; imports in a `try` it leaves alone.
CODE = '''\
"""target.generate(..., custom_generate=folder, trust_remote_code=True, draft=folder): decoding with this draft."""

try:
    from longspec.decode.generate import generate
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{error}: decoding with this draft is done by the code that trained it; install longspec from its repository "
        "(pip install .)"
    ) from error

__all__ = ["generate"]
'''


def write_custom_generate(folder: Path) -> None:
    """Write the file into a draft folder."""
    write_text(folder / FILE, CODE)
