"""Write `docs/spec.md`, the reference of the study document, from the models themselves.

.venv/bin/python docs/spec_reference.py          # rewrites docs/spec.md
"""

from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from trials.spec import preset_names, preset_text
from trials.spec.models import StudySpec

PAGE = Path(__file__).with_name("spec.md")

_NAMES = {int: "whole number", float: "number", str: "text", bool: "`true` or `false`"}

HEAD = """# The study document (wire version 1)

Generated from the models in `trials/spec` by `docs/spec_reference.py`; a test fails where the two differ.

JSON and YAML are both accepted and mean the same. Unknown keys are refused with the nearest valid
name; text is never read as a number; `1e-3` is a number in YAML too. A key without a default is
required; a key at its default counts as left out. Version 1 documents stay readable for ever.
"""


def reference() -> str:
    """The whole page as Markdown."""
    parts = [HEAD, _table("study", StudySpec)]
    for path, model in _nested(StudySpec):
        parts.append(_table(path, model))
    parts.append("## Presets\n")
    for name in preset_names():
        parts.append(f"### `{name}`\n\n```yaml\n{preset_text(name).strip()}\n```\n")
    return "\n".join(parts)


def _nested(model: type[BaseModel], prefix: str = "") -> list[tuple[str, type[BaseModel]]]:
    found = []
    for name, field in model.model_fields.items():
        for member in _flat(field.annotation):
            is_list = get_origin(member) is list
            alternatives = _flat(get_args(member)[0]) if is_list else [member]
            for inner in alternatives:
                if isinstance(inner, type) and issubclass(inner, BaseModel):
                    path = f"{prefix}{name}" + ("[]" if is_list else "")
                    title = f"{path}, kind: {_kind(inner)}" if len(alternatives) > 1 else path
                    found += [(title, inner), *_nested(inner, f"{path}.")]
    return found


def _kind(model: type[BaseModel]) -> str:
    return get_args(model.model_fields["kind"].annotation)[0]


def _table(path: str, model: type[BaseModel]) -> str:
    lines = [f"## `{path}`\n", f"{(model.__doc__ or '').strip().splitlines()[0]}\n"]
    lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        cells = (f"`{name}`", _type(field.annotation, field), _default(field), field.description or "")
        lines.append("| " + " | ".join(" ".join(c.replace("|", "\\|").split()) for c in cells) + " |")
    return "\n".join(lines) + "\n"


def _flat(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Annotated:
        return _flat(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [m for a in get_args(annotation) for m in _flat(a)]
    return [annotation]


def _type(annotation: Any, field: FieldInfo | None = None) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        bounds = [m for meta in arguments[1:] for m in getattr(meta, "metadata", [meta])]
        return _type(arguments[0]) + _bounds(bounds, _unit(arguments[0]))
    members = [m for m in _flat(annotation) if m is not type(None)]
    if origin in (Union, UnionType) and all(isinstance(m, type) and issubclass(m, BaseModel) for m in members):
        return "mapping, see below"
    if origin in (Union, UnionType):
        return " or ".join(_type(a) for a in arguments if a is not type(None)) + (
            _bounds(field.metadata, _unit(annotation)) if field else ""
        )
    if origin is Literal:
        return ", ".join(f"`{a}`" for a in arguments)
    if origin is list:
        return f"list of {_type(arguments[0])}" + (_bounds(field.metadata, "entries") if field else "")
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "mapping, see below"
    return _NAMES[annotation] + (_bounds(field.metadata) if field else "")


def _unit(annotation: Any) -> str:
    return "entries" if any(get_origin(member) is list for member in _flat(annotation)) else "characters"


def _bounds(metadata: list[Any], unit: str = "characters") -> str:
    words = []
    for item in metadata:
        for attribute, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<")):
            if hasattr(item, attribute):
                words.append(f"{sign} {getattr(item, attribute):,}")
        for attribute, word in (("min_length", "at least"), ("max_length", "at most")):
            if hasattr(item, attribute):
                count = getattr(item, attribute)
                words.append(f"{word} {count:,} {unit if count != 1 else unit.replace('ies', 'y').rstrip('s')}")
    return f" ({', '.join(words)})" if words else ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "*required*"
    default = field.get_default(call_default_factory=True)
    if isinstance(default, BaseModel):
        return "all defaults"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return "" if default is None else "none" if default == [] else f"`{default}`"


if __name__ == "__main__":
    PAGE.write_text(reference())
