"""What every section of the configuration is, and how it says that two keys do not go together."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import BaseModel, ConfigDict, StringConstraints
from pydantic_core import PydanticCustomError

Name: TypeAlias = Annotated[str, StringConstraints(min_length=1)]

CONFLICT = "conflict"  # the type of the errors about keys that do not go together


class Section(BaseModel):
    """A frozen part of the configuration; unknown keys are errors, and nothing is converted silently."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def conflict(key: str, what: str) -> PydanticCustomError:
    """Return the error of a section whose key does not go with another."""
    return PydanticCustomError(CONFLICT, "{what}", {"what": what, "key": key})
