"""What a thing of the user's holds beside plain values, and its code where no file has it, as one digest."""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

from torch import Tensor, nn

from flatrock.core.errors import is_plain
from flatrock.core.files import json_text, sha256
from flatrock.core.guests import origin
from flatrock.core.tensorfile import tensors_digest, weights_digest

# What a method that calls super() closes over: its own class.
_ITSELF = "__class__"
_WRITTEN = ("__call__", "__post_init__")
_SLOTS = (MemberDescriptorType, GetSetDescriptorType)
DEEPEST = 40  # of what lies deeper within each other the kind alone is told


def held_digest(thing: object, options: Mapping[str, Any]) -> str | None:
    """A digest of what file and plain options of a class or function do not tell; None if they tell it all.

    `options` are those of the thing, or of an object of it. The digest is of contents, never of addresses, so another
    process makes the same of them.
    """
    others = {name: value for name, value in options.items() if not is_plain(value)}
    beyond = not _told_by_file(thing)
    if not others and not beyond:
        return None
    told = _Told()
    return sha256(json_text([told.of(others), told.of(thing) if beyond else None]))


def _told_by_file(thing: object) -> bool:
    """Whether a class, a function or what is called as one is what its file says, whatever ran before.

    It has a name there; or it closes over nothing, or over plain values only in a file that is imported, not a script.
    """
    if isinstance(thing, MethodType):
        return _told_by_file(thing.__func__) and _told_by_file(thing.__self__)
    if isinstance(thing, partial) or not origin(thing):
        return False
    if not isinstance(thing, FunctionType | type):
        return getattr(thing, "__dict__", None) == {} and _told_by_file(type(thing))
    module = sys.modules[thing.__module__]
    found: object = module
    for part in thing.__qualname__.split("."):
        found = getattr(found, part, None)
    if found is thing:
        return True
    values = [value for function in _functions(thing) for value in _cells(function).values()]
    values += [value for value in _members(thing).values() if not is_plain(value)]
    named = module.__name__ != "__main__" and any(value is thing for value in vars(module).values())
    return not values or (named and is_plain(values))


def _functions(thing: FunctionType | type) -> list[FunctionType]:
    """The function, or the methods of a class that it does not inherit."""
    if isinstance(thing, FunctionType):
        return [thing]
    made = "__dataclass_fields__" in vars(thing)  # which writes the methods of these names itself
    names = [name for name in vars(thing) if not (made and name.startswith("__")) or name in _WRITTEN]
    return [member for name in names if (member := _function(vars(thing)[name]))]


def _function(member: Any) -> FunctionType | None:
    """What is written in a class as a method, a property, or one of the class."""
    inner = getattr(member, "__func__", getattr(member, "fget", member))
    return inner if isinstance(inner, FunctionType) else None


def _members(thing: FunctionType | type) -> dict[str, Any]:
    """What a class holds that is no function, without what Python puts there."""
    own = {} if isinstance(thing, FunctionType) else dict(vars(thing))
    written = {k: v for k, v in own.items() if not k.startswith("__") and not k.startswith("_abc_")}
    return {k: v for k, v in written.items() if not isinstance(v, _SLOTS) and _function(v) is None}


def _cells(function: FunctionType) -> dict[str, Any]:
    """What a function closes over, by name, as far as it has been given a value."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells if name != _ITSELF and _is_filled(cell)}


def _is_filled(cell: Any) -> bool:
    try:
        return bool(cell.cell_contents is not cell)
    except ValueError:
        return False


class _Told:
    """Makes lists and text of anything; what was met before is named by the place it was met at."""

    def __init__(self) -> None:
        self._met: dict[int, int] = {}
        self._kept: list[object] = []  # a thing that were freed would leave its id to another
        self._depth = 0

    def of(self, value: object) -> Any:
        """The same for the same contents, in any process."""
        if is_plain(value):
            return repr(value)
        if id(value) in self._met:
            return ["again", self._met[id(value)]]
        self._met[id(value)] = len(self._met)
        self._kept.append(value)
        self._depth += 1
        try:
            return ["deep", _name(type(value))] if self._depth > DEEPEST else self._parts(value)
        except Exception:  # of what cannot be read, such as a network that is not made yet, the kind alone
            return ["kind", _name(type(value))]
        finally:
            self._depth -= 1

    def _parts(self, value: object) -> Any:
        if isinstance(value, Tensor):
            return ["tensor", str(value.dtype), list(value.shape), None if value.is_meta else _tensor_digest(value)]
        if isinstance(value, nn.Module):
            return ["network", _name(type(value)), weights_digest(value)]
        if isinstance(value, bytes | bytearray):
            return ["bytes", sha256(bytes(value))]
        if isinstance(value, Mapping):
            return ["mapping", sorted(([self.of(k), self.of(v)] for k, v in value.items()), key=json_text)]
        if isinstance(value, list | tuple):
            return [self.of(one) for one in value]
        if isinstance(value, set | frozenset):
            return ["set", sorted(repr(one) if is_plain(one) else _name(type(one)) for one in value)]  # in no order
        return self._code(value) if isinstance(value, FunctionType | type | CodeType) else self._object(value)

    def _object(self, value: object) -> Any:
        if isinstance(value, ModuleType | BuiltinFunctionType):
            return ["named", _name(value)]
        if isinstance(value, MethodType):
            return ["method", self.of(value.__func__), self.of(value.__self__)]
        if isinstance(value, partial):
            return ["partial", self.of(value.func), self.of(value.args), self.of(value.keywords)]
        try:  # as a copy of it would be made
            made = value.__reduce_ex__(4)
        except Exception:  # of what cannot be copied (locks, open files), the kind alone
            return ["kind", self.of(type(value))]
        parts = [list(p) if p is not None and i > 2 else p for i, p in enumerate(made[1:5], 1)] if made[1:] else []
        return ["object", self.of(type(value)), made if isinstance(made, str) else self.of(parts)]

    def _code(self, value: FunctionType | type | CodeType) -> Any:
        if isinstance(value, CodeType):
            constants = [self.of(constant) for constant in value.co_consts]
            return ["code", value.co_name, sha256(value.co_code), list(value.co_names), constants]
        name = _name(value)
        if _told_by_file(value):
            return ["file", name, origin(value).get("sha256") if isinstance(value, FunctionType) else None]
        if isinstance(value, FunctionType):
            outside = {n: value.__globals__[n] for n in _outside(value.__code__) if n in value.__globals__}
            given = [_cells(value), value.__defaults__, value.__kwdefaults__]
            return ["function", name, self.of(origin(value) or [value.__code__, outside]), self.of(given)]
        if value.__module__ in sys.builtin_module_names:
            return ["named", name]
        within = [[self.of(f) for f in _functions(value)], self.of(_members(value))]
        return ["class", name, self.of([*value.__bases__]), *within]


def _outside(code: CodeType) -> Iterable[str]:
    """The globals that code, and code within it, names."""
    own = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return sorted(own.union(*(_outside(c) for c in code.co_consts if isinstance(c, CodeType))))


def _tensor_digest(tensor: Tensor) -> str:
    return tensors_digest({"": tensor.detach().to_dense()})


def _name(thing: Any) -> str:
    return f"{getattr(thing, '__module__', None)}.{getattr(thing, '__qualname__', getattr(thing, '__name__', ''))}"
