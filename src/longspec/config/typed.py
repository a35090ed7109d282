"""Types of keys: what a value may be, its bounds and words. By pydantic; what is said of a wrong value: faults.py.

A bound is where a value has no meaning any more (no target has 2**24 positions, no job lasts a year), not where it is unwise.
Not a number (.nan) and infinity (.inf) lie in no range. Numbers are never read from text, and true is no number.
"""

from dataclasses import dataclass
from typing import Annotated, Any

from omegaconf import MISSING
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema

from longspec.config.names import IS_NAME, NAME, is_name

MOST_TOKENS = 2**24
MANY = 10**9
YEAR_MINUTES = 365 * 24 * 60


class Keys(BaseModel):
    """Keys that are known; any other is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class OwnTitles(GenerateJsonSchema):
    """A JSON Schema whose titles are those that a type gives itself, such as "a name", and not its field's name again."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Never: the key says it."""
        return False

    def default_schema(self, schema: Any) -> Any:
        """Without the marks of a key that may be left out, and of one that must be given."""
        found = super().default_schema(schema)
        return {key: value for key, value in found.items() if key != "default" or value not in (None, MISSING)}


@dataclass(frozen=True)
class Words:
    """One of these values: OmegaConf, which types the same fields, knows no Literal."""

    known: tuple[Any, ...]

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        """Return pydantic's own schema of a literal."""
        return core_schema.literal_schema(list(self.known))


@dataclass(frozen=True)
class As:
    """Another type than the one that is annotated: OmegaConf has no models inside of lists."""

    kind: Any

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        """Return the schema of the other type."""
        return handler.generate_schema(self.kind)


def means(help_text: str) -> Any:
    """One sentence on a key; it completes "it is ..."."""
    return Field(description=help_text)


def left_out(description: str, **more: Any) -> Any:
    """A key that may be left out, with no default that is the same everywhere."""
    return Field(None, description=description, **more)


def words(*known: str) -> Words:
    """One of these texts."""
    return Words(known)


def _named(text: str) -> str:
    if not is_name(text):
        raise ValueError(f"{text!r} is no name; a name has {IS_NAME}")
    return text


Text = Annotated[str, Strict()]
Filled = Annotated[str, Strict(), Field(min_length=1)]
Flag = Annotated[bool, Strict()]
Name = Annotated[
    str, Strict(), AfterValidator(_named), Field(title="a name", json_schema_extra={"pattern": f"^{NAME.pattern}$"})
]
Whole = Annotated[int, Strict()]
Number = Annotated[float, Strict(), Field(allow_inf_nan=False)]

Tokens = Annotated[Whole, Field(ge=1, le=MOST_TOKENS)]  # of a row, a window, a batch
RowTokens = Annotated[Whole, Field(ge=2, le=MOST_TOKENS)]  # one token alone has no next one to learn
Count = Annotated[Whole, Field(ge=1, le=MANY)]
CountOrNone = Annotated[Whole, Field(ge=0, le=MANY)]
Size = Annotated[Whole, Field(ge=1, le=2**20)]  # of a layer of a small target
Seed = Annotated[Whole, Field(ge=0, le=2**63 - 1)]  # torch takes no larger one, and numpy none below 0
Rate = Annotated[Number, Field(gt=0, le=1)]
Share = Annotated[Number, Field(ge=0, le=1)]
# Zero for greedy. Below the smallest float32 overflows; above the largest, every token is as likely as the next.
Temperature = Annotated[int, Words((0,))] | Annotated[Number, Field(ge=0.0001, le=100)]
