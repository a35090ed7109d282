"""Two runs of a job make the same sums: torch's products are made in the mode of MKL that promises it."""

import os
import re
import subprocess
import sys

import pytest
import torch

CHOSEN = "import os, longspec; print(os.environ['MKL_CBWR'])"
PRODUCT = f"{CHOSEN}; import torch; torch.ones(64, 64) @ torch.ones(64, 64)"


def printed(code: str, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"} | variables
    return subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch is built without MKL")
def test_products_are_made_in_the_reproducible_mode_and_a_user_may_choose_another() -> None:
    assert set(re.findall(r"SGEMM\(.* CNR:(\w+)", printed(PRODUCT, MKL_VERBOSE="1"))) == {"AUTO"}
    assert printed(CHOSEN, MKL_CBWR="COMPATIBLE") == "COMPATIBLE\n"
