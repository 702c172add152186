"""Text → document: strict JSON and YAML, and the presets that ship with the package."""

import json
import re
from importlib import resources
from typing import Any

import yaml

from trials.spec.models import StudySpec, parse_spec

MAX_DEPTH = 20
"""Deepest nesting accepted; a study needs five."""


class DocumentError(ValueError):
    """Text that is not well-formed JSON or YAML, or says one thing twice."""


def parse_document(text: str | bytes, kind: str) -> Any:
    """Decode a document.

    Args:
        text: the document; bytes must be UTF-8.
        kind: `json` or `yaml`.

    Raises:
        DocumentError: malformed text, a repeated key, NaN or infinity in JSON, a YAML alias
            or tag, or nesting beyond `MAX_DEPTH`.
    """
    try:
        decoded = text.decode() if isinstance(text, bytes) else text
    except UnicodeDecodeError as error:
        raise DocumentError(f"the document is not UTF-8: {error}") from None
    try:
        document = _from_json(decoded) if kind == "json" else _from_yaml(decoded)
    except RecursionError:
        raise DocumentError(f"the document is nested deeper than {MAX_DEPTH} levels") from None
    _check_depth(document, MAX_DEPTH)
    return document


def preset_names() -> list[str]:
    """Names of the presets, sorted."""
    folder = resources.files("trials") / "presets"
    return sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml"))


def preset_text(name: str) -> str:
    """The YAML text of a preset.

    Raises:
        KeyError: no preset of that name.
    """
    if name not in preset_names():
        raise KeyError(name)
    return (resources.files("trials") / "presets" / f"{name}.yaml").read_text()


def load_preset(name: str) -> StudySpec:
    """
    Raises:
        KeyError: no preset of that name.
    """
    return parse_spec(parse_document(preset_text(name), "yaml"))


def _from_json(text: str) -> Any:
    def refuse_constant(name: str) -> Any:
        raise DocumentError(f"{name} is not a JSON number; write a finite number")

    def refuse_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        document: dict[str, Any] = {}
        for key, value in pairs:
            if key in document:
                raise DocumentError(f"key {key!r} appears twice; keep one")
            document[key] = value
        return document

    try:
        return json.loads(text, parse_constant=refuse_constant, object_pairs_hook=refuse_repeats)
    except json.JSONDecodeError as error:
        raise DocumentError(f"not well-formed JSON: {error}") from None
    except ValueError as error:  # DocumentError passes; the rest is an integer of thousands of digits
        raise error if isinstance(error, DocumentError) else DocumentError(f"not well-formed JSON: {error}") from None


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader without aliases or repeated keys, that reads `1e-3` as the number it is.

    YAML 1.1 wants a dot and a sign (`1.0e-3`); everybody writes `1e-3`.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise DocumentError("YAML aliases are not accepted; write the value out")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise DocumentError(f"keys must be text, not {key!r} (line {key_node.start_mark.line + 1})")
            if key in seen:
                raise DocumentError(f"key {key!r} appears twice (line {key_node.start_mark.line + 1}); keep one")
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


_StrictLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)


def _from_yaml(text: str) -> Any:
    try:
        return yaml.load(text, Loader=_StrictLoader)  # noqa: S506 - a SafeLoader subclass
    except yaml.YAMLError as error:
        raise DocumentError(f"not well-formed YAML: {error}") from None
    except DocumentError:
        raise
    except (ValueError, OverflowError, KeyError, AttributeError, TypeError) as error:  # a tag on a wrong value
        raise DocumentError(f"not well-formed YAML: {error!r}") from None


def _check_depth(value: Any, left: int) -> None:
    if left < 0:
        raise DocumentError(f"the document is nested deeper than {MAX_DEPTH} levels")
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for child in children:
        _check_depth(child, left - 1)
