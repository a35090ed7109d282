"""A placeholder for imports: the drafter is not built yet."""

from typing import Any


class Eagle3Drafter:
    """Decodes with a layer beside its target."""

    reads: tuple[str, ...] = ()

    def __init__(self, target: Any, layer: Any, settings: Any) -> None:
        raise NotImplementedError
