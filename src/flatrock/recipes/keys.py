"""What sections of a recipe are made of: numbers as people write them, groups of keys, things chosen by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

from flatrock.core.errors import ConfigError
from flatrock.core.numbers import number, scalar


def to_number(value: Any) -> float:
    """A number, also one written as 8/255; what pydantic reports if it is none."""
    try:
        return number(value)
    except ConfigError as error:
        raise ValueError(str(error)) from error


def _whole(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("but it must be a whole number")
    return scalar(value) if isinstance(value, str) else value


Number = Annotated[float, BeforeValidator(to_number)]
Whole = Annotated[int, BeforeValidator(_whole)]


class Section(BaseModel):
    """A group of keys; unknown keys are faults."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Named(BaseModel):
    """A thing chosen by name; the other keys are its options, checked against its registry."""

    model_config = ConfigDict(extra="allow", frozen=True)
    # Declared keys that are of the thing named all the same, and go with its options where another is named above it.
    its_own: ClassVar[tuple[str, ...]] = ()
    name: str

    @model_validator(mode="before")
    @classmethod
    def _spelled_alike(cls, values: Any) -> Any:
        """1/255 in a file and on the command line are the same choice, so they are stored, and hash, alike."""
        if not isinstance(values, Mapping):
            return values
        return {k: v if k in cls.model_fields else _read(v) for k, v in values.items()}

    @classmethod
    def stays(cls, key: str, name: object) -> bool:
        """Whether a key is kept where a thing of this name is named above: it is said of any such thing."""
        return key in cls.model_fields and key not in cls.its_own

    @property
    def options(self) -> dict[str, Any]:
        """Every key but the declared ones."""
        return dict(self.model_extra or {})


def _read(value: Any) -> Any:
    if isinstance(value, str):
        return scalar(value)
    return [_read(v) for v in value] if isinstance(value, list) else value


def _named(value: Any) -> Any:
    if not isinstance(value, str | Mapping):
        raise ValueError("but an attack is text such as 'pgd-20' or a mapping such as {name: pgd, steps: 20}")
    return value


# The check comes first: what fits neither of two types would be two faults.
AttackSpec = Annotated[str | dict[str, Any], BeforeValidator(_named)]
