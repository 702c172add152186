"""/v1/presets: studies that are ready to run."""

from typing import Any

from fastapi import APIRouter, Depends

from service.problems import NotFound, documented
from service.services import Parts, check_query
from service.submission import size
from service.views import PresetItem, PresetPage, PresetView, plan_view, spec_document
from trials.spec import load_preset, nearest, preset_names, preset_text

router = APIRouter(prefix="/v1/presets", tags=["presets"], dependencies=[Depends(check_query)])


@router.get("", response_model=PresetPage, summary="List presets", responses=documented(422))
def list_presets(parts: Parts) -> Any:
    items = []
    for name in preset_names():
        spec = load_preset(name)
        plan = plan_view(size(spec, parts.settings).plan)
        items.append(PresetItem(name=name, description=spec.description, plan=plan))  # pyright: ignore[reportArgumentType]
    return PresetPage(items=items)


@router.get("/{name}", response_model=PresetView, summary="A preset", responses=documented(404, 422))
def get_preset(name: str) -> Any:
    known = preset_names()
    if name not in known:
        guess = nearest(name, known)
        hint = f"did you mean {guess!r}?" if guess else f"there are: {', '.join(known)}"
        raise NotFound(f"there is no preset {name!r}; {hint}")
    return PresetView(name=name, text=preset_text(name), spec=dict(spec_document(load_preset(name))))
