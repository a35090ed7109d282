"""The JSON Schema of a run's file, by which editors complete and check it.

python -m longspec.config.run_schema > config/run.schema.json
"""

import json

from longspec.config.run_file import RunFile


def text() -> str:
    """Return the schema as the repository keeps it."""
    schema = RunFile.model_json_schema()
    names = {"type": "array", "items": {"type": "string"}}
    stages = schema["properties"]["stages"]
    of_names = {"anyOf": [{"$ref": "#/$defs/StageFile"}, {"type": "null"}]}
    schema["properties"]["stages"] = {
        "description": stages["description"],
        "anyOf": [names, {"type": "object", "additionalProperties": of_names}],
    }
    return json.dumps(schema | {"title": "A run of longspec"}, indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    print(text(), end="")
