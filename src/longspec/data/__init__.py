"""Records in, packed rows out."""

from collections.abc import Callable
from typing import Any

Progress = Callable[[int], Any] | None  # is told how many more are done
