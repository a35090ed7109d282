"""Types of keys: what a value may be, its bounds and words, checked by pydantic; faults.py says what is wrong with one.

A bound marks values that have no meaning (no target has 2**24 positions, no job lasts a year), not unwise ones. Not a number
(.nan) and infinity (.inf) lie in no range. Numbers are never read from text, and true is no number.
"""

from collections.abc import Sequence
from typing import Annotated, Any

from omegaconf import MISSING
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetPydanticSchema, Strict
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import PydanticCustomError, core_schema

from longspec.config.names import NAME, checked_name

MOST_TOKENS = 2**24
MANY = 10**9
YEAR_MINUTES = 365 * 24 * 60


class Keys(BaseModel):
    """Hold keys that are known; refuse any other."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class OwnTitles(GenerateJsonSchema):
    """Make a JSON Schema with the titles that types give themselves, such as "a name", instead of their fields' names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Return False: the key says it already."""
        return False

    def default_schema(self, schema: Any) -> Any:
        """Leave out None, the default of a key that may be left out, and MISSING, the mark of one that must be given."""
        found = super().default_schema(schema)
        return {key: value for key, value in found.items() if key != "default" or value not in (None, MISSING)}


def words(*known: Any) -> Any:
    """Allow these values alone. OmegaConf, which types the same fields, knows no Literal."""

    def checked(value: Any) -> Any:
        if not any(isinstance(value, bool) == isinstance(each, bool) and value == each for each in known):  # true is no 1
            raise PydanticCustomError("literal_error", "is none of them")
        return value

    literal = core_schema.literal_schema(list(known))
    return GetPydanticSchema(lambda _, __: core_schema.no_info_before_validator_function(checked, literal))


def checked_as(kind: Any) -> Any:
    """Check by another type than the annotated one, since OmegaConf has no models inside lists."""
    return GetPydanticSchema(lambda _, handler: handler.generate_schema(kind))


def sections(*known: str) -> Any:
    """Allow a mapping of any keys; those in `known` must hold mappings. `data.replay` is the key replay in the section data."""
    return GetPydanticSchema(lambda _, __: _mapping(known))


def _mapping(known: Sequence[str]) -> core_schema.CoreSchema:
    within = {name: [each.removeprefix(f"{name}.") for each in known if each.startswith(f"{name}.")] for name in known}
    kinds = {name: _mapping(keys) for name, keys in within.items() if "." not in name}
    fields = {name: core_schema.typed_dict_field(kind, required=False) for name, kind in kinds.items()}
    return core_schema.typed_dict_schema(fields, extra_behavior="allow") if known else core_schema.dict_schema()


def means(help_text: str) -> Any:
    """Give a key its help: a sentence that completes "it is ..."."""
    return Field(description=help_text)


def left_out(description: str, **more: Any) -> Any:
    """Give its help to a key that may be left out and has no default that is the same everywhere."""
    return Field(None, description=description, **more)


def _once(given: list[str]) -> list[str]:
    for name in given:
        if given.count(name) > 1:
            raise ValueError(f"{name} stands twice; name each once")
    return given


Once = AfterValidator(_once)  # of a list
Text = Annotated[str, Strict()]
Filled = Annotated[str, Strict(), Field(min_length=1)]
Flag = Annotated[bool, Strict()]
Name = Annotated[
    str, Strict(), AfterValidator(checked_name), Field(title="a name", json_schema_extra={"pattern": f"^{NAME.pattern}$"})
]
OF_STAGE = "/"  # between an earlier stage and its data set, in recipe.data.replay
Replayed = Annotated[
    str,
    Strict(),
    AfterValidator(lambda text: OF_STAGE.join(map(checked_name, text.split(OF_STAGE, 1)))),
    Field(
        title=f"a stage, or a stage{OF_STAGE}data set",
        json_schema_extra={"pattern": f"^{NAME.pattern}({OF_STAGE}{NAME.pattern})?$"},
    ),
]
Whole = Annotated[int, Strict()]
Number = Annotated[float, Strict(), Field(allow_inf_nan=False)]

Tokens = Annotated[Whole, Field(ge=1, le=MOST_TOKENS)]  # of a row, a window, a batch
RowTokens = Annotated[Whole, Field(ge=2, le=MOST_TOKENS)]  # one token alone has no next one to learn
Count = Annotated[Whole, Field(ge=1, le=MANY)]
CountOrNone = Annotated[Whole, Field(ge=0, le=MANY)]
Size = Annotated[Whole, Field(ge=1, le=2**20)]  # of a layer of a small target
Seed = Annotated[Whole, Field(ge=0, le=2**63 - 1)]  # torch takes no larger one, and numpy none below 0
PartOfAll = Annotated[Number, Field(gt=0, lt=1)]
Mix = dict[Name, PartOfAll]  # data sets with their shares
NameOrMix = Annotated[  # a mix is checked apart, so that a fault names the data set
    Any,
    AfterValidator(lambda data: data if isinstance(data, dict) else checked_name(data)),
    Field(title="a name, or a mapping from names to shares", json_schema_extra={"type": ["string", "object"]}),
]
Rate = Annotated[Number, Field(gt=0, le=1)]
Share = Annotated[Number, Field(ge=0, le=1)]
# Zero is greedy. Below the lower bound float32 overflows; above the upper one every token is as likely as the next.
Temperature = Annotated[int, words(0)] | Annotated[Number, Field(ge=0.0001, le=100)]
