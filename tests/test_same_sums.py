"""Two runs of a job make the same sums: torch's products are made in the mode of MKL that promises it."""

import os
import re
import subprocess
import sys

import pytest
import torch

PRODUCT = "import longspec, torch; torch.ones(64, 64) @ torch.ones(64, 64)"


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch is built without MKL")
@pytest.mark.parametrize(("chosen", "mode"), [({}, "AUTO"), ({"MKL_CBWR": "COMPATIBLE"}, "COMPATIBLE")])
def test_products_are_made_in_the_reproducible_mode_and_a_user_may_choose_another(chosen: dict[str, str], mode: str) -> None:
    kept = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    made = subprocess.run(
        [sys.executable, "-c", PRODUCT], env=kept | {"MKL_VERBOSE": "1"} | chosen, capture_output=True, text=True, check=True
    )
    assert set(re.findall(r"SGEMM\(.* CNR:(\w+)", made.stdout)) == {mode}
