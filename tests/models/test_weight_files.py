"""Files of weights: what keeps one from being opened is told as what it is."""

import json
import re
import resource
from pathlib import Path

import pytest

from longspec.models.weight_files import open_safetensors


def test_a_lack_of_memory_is_not_told_as_damage(tmp_path: Path) -> None:
    """Of a whole file, 4 GiB of nothing, under a limit of what may be mapped."""
    path, size = tmp_path / "model.safetensors", 2**32
    header = json.dumps({"weight": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with path.open("r+b") as file:
        file.truncate(8 + len(header) + size)
    with open_safetensors(path) as file:
        assert list(file.keys()) == ["weight"]
    held = re.search(r"VmData:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert held is not None
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (int(held[1]) * 1024 + 2**30, before[1]))
    try:
        with pytest.raises(ValueError, match=rf"^{re.escape(str(path))}: no memory is left to map it .*; raise the limit"):
            open_safetensors(path)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
