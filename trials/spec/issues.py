"""Complaints about a study document, in words a user can act on."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails


@dataclass(frozen=True)
class Issue:
    """One fault: a JSON pointer (RFC 6901) to its place, and what to do about it."""

    pointer: str
    detail: str


class SpecError(ValueError):
    """A study document that cannot be accepted; `issues` has every fault found."""

    def __init__(self, issues: Sequence[Issue]):
        self.issues = tuple(issues)
        super().__init__("; ".join(f"{i.pointer or '(document)'}: {i.detail}" for i in self.issues))


def issues_from(error: ValidationError, model: type[BaseModel]) -> list[Issue]:
    """Translate pydantic's errors on `model`, in order, one issue per place and fault."""
    found = [(*_resolve(details["loc"], model), details) for details in error.errors(include_url=False)]
    issues: list[Issue] = []
    for path, owner, details in found:
        if details["type"] == "union_tag_invalid":
            issues.append(Issue(pointer([*path, "kind"]), _invalid(*_kind_and_valid(details))))
            continue
        others = [(p, d) for p, _, d in found if d is not details]
        if any(_is_wrong_alternative(path, details, p, d) for p, d in others):
            continue
        issue = Issue(pointer(path), _detail(details, owner))
        if issue not in issues:
            issues.append(issue)
    return issues


def _is_wrong_alternative(
    path: list[str | int], details: ErrorDetails, other_path: list[str | int], other: ErrorDetails
) -> bool:
    """Whether the fault only says that some other member of a union was expected.

    Pydantic reports a union (a count or a list of seeds) once per member; what a user needs is
    the complaint of the member that fits the kind of thing that was written.
    """
    value, kind = details.get("input"), details["type"]
    if kind == "int_type" and isinstance(value, list):
        is_of_the_list = len(other_path) > len(path) or other["type"] in {"too_short", "too_long"}
        return other_path[: len(path)] == path and is_of_the_list
    if kind in {"list_type", "literal_error"}:
        return other_path == path and other["type"] not in {"list_type", "literal_error"}
    return False


def pointer(path: Sequence[str | int]) -> str:
    """A JSON pointer: `/space/batch_size/2`; the whole document is the empty text."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in path)


def nearest(word: str, valid: Sequence[str]) -> str | None:
    """The valid name that `word` most likely meant, if one is close."""
    matches = difflib.get_close_matches(word.lower(), [v.lower() for v in valid], n=1, cutoff=0.5)
    return next((v for v in valid if v.lower() == matches[0]), None) if matches else None


def _detail(details: ErrorDetails, owner: type[BaseModel] | None) -> str:
    kind, context, value = details["type"], details.get("ctx", {}), details.get("input")
    if kind == "extra_forbidden":
        name = str(details["loc"][-1])
        valid = list(owner.model_fields) if owner else []
        guess = nearest(name, valid)
        hint = f"did you mean {guess!r}?" if guess else f"valid here: {', '.join(valid)}"
        return f"unknown key {name!r}; {hint}"
    if kind == "missing":
        return "required, but missing"
    if kind == "literal_error":
        return _invalid(value, _names(context["expected"].replace(" or ", ", ")))
    if kind == "model_type":
        return f"must be a mapping of keys to values, not {_show(value)}"
    if kind in {"float_type", "int_type"} and isinstance(value, str):
        return f"must be a number, not text ({_show(value)}); write it without quotes"
    if kind == "int_from_float" or (kind == "int_type" and isinstance(value, float)):
        return f"must be a whole number, written without a decimal point, not {_show(value)}"
    if kind == "value_error":
        return str(context.get("error", details["msg"]))
    if kind == "string_pattern_mismatch":
        return (
            f"{_show(value)} is not a valid name: use letters, digits, space, '.', '_' or '-', "
            "starting and ending with a letter or digit"
        )
    if kind == "list_type" and isinstance(value, int | float | str):
        return f"must be a list, such as [{_show(value)}]"
    message = details["msg"].removeprefix("Input ")
    return f"{message}, not {_show(value)}" if not isinstance(value, dict | list) else message


def _invalid(value: Any, valid: Sequence[str]) -> str:
    guess = nearest(value, valid) if isinstance(value, str) else None
    hint = f"did you mean {guess!r}? " if guess else ""
    return f"{_show(value)} is not one of the valid values; {hint}Valid: {', '.join(valid)}"


def _kind_and_valid(details: ErrorDetails) -> tuple[Any, list[str]]:
    """What was written where a union is told apart by `kind`, and what could have been."""
    return details["input"]["kind"], _names(details.get("ctx", {})["expected_tags"])


def _names(listed: str) -> list[str]:
    return [name.strip().strip("'") for name in listed.split(",")]


def _show(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print integers of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= 60 else text[:57] + "..."


def _resolve(location: Sequence[str | int], model: type[BaseModel]) -> tuple[list[str | int], type[BaseModel] | None]:
    """Drop pydantic's union-member tags from a location, and find the model that holds its last key."""
    path: list[str | int] = []
    owner: type[BaseModel] | None = model
    current: Any = model
    for part in location:
        models = [m for m in _members(current) if isinstance(m, type) and issubclass(m, BaseModel)]
        if isinstance(part, int):
            path.append(part)
            current = next((get_args(m)[0] for m in _members(current) if get_origin(m) is list), Any)
        elif len(models) > 1 and (tagged := [m for m in models if _tag(m) == part]):
            current = tagged[0]  # a union told apart by `kind`: the tag is not a place in the document
        elif models:
            owner = models[0]
            path.append(part)
            field = owner.model_fields.get(part)
            current = field.annotation if field else Any
        elif current is Any and not path:
            path.append(part)
        # any other text names a union member, not a place in the document
    return path, owner


def _tag(model: type[BaseModel]) -> str | None:
    kind = model.model_fields.get("kind")
    return get_args(kind.annotation)[0] if kind and get_origin(kind.annotation) is Literal else None


def _members(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [member for arg in get_args(annotation) for member in _members(arg)]
    return [annotation]
