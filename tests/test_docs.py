"""The documents say what the code does."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_spec_reference_is_current():
    location = ROOT / "docs" / "spec_reference.py"
    spec = importlib.util.spec_from_file_location("spec_reference", location)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text() == module.reference(), "run: .venv/bin/python docs/spec_reference.py"


@pytest.mark.parametrize(
    "page", sorted(p.relative_to(ROOT).as_posix() for p in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
)
def test_relative_links_lead_somewhere(page: str):
    import re

    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", (ROOT / page).read_text()):
        if "://" not in target:
            assert (ROOT / page).parent.joinpath(target).exists(), f"{page} links to {target}"


def test_the_architecture_names_every_module():
    page = (ROOT / "docs" / "architecture.md").read_text()
    modules = [
        path.name
        for package in ("trials", "trials/spec", "trials/engine", "analysis", "service")
        for path in (ROOT / package).glob("*.py")
        if path.name != "__init__.py"
    ]
    assert [name for name in modules if name not in page] == []


def test_every_setting_is_documented():
    from service.settings import Settings

    page = (ROOT / "docs" / "operations.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `NORMSTUDY_")]
    documented = {line.split("`")[1]: line for line in rows}
    assert set(documented) == {f"NORMSTUDY_{name.upper()}" for name in Settings.model_fields}
    for name, field in Settings.model_fields.items():
        assert str(field.description) in documented[f"NORMSTUDY_{name.upper()}"]


def test_every_result_column_is_documented():
    from trials.table import RESULTS_SCHEMA

    page = (ROOT / "docs" / "results.md").read_text()
    assert [name for name in RESULTS_SCHEMA.names if f"`{name}`" not in page] == []


def test_every_key_of_the_verdict_is_documented():
    import json

    page = (ROOT / "docs" / "results.md").read_text()
    shape = json.loads((ROOT / "tests" / "analysis" / "golden" / "verdict_shape.json").read_text())
    obvious = {"schema", "study", "design", "budget", "chance_accuracy"}
    assert [key for key in shape if key not in obvious and f"`{key}`" not in page and f"`{key}[]`" not in page] == []
