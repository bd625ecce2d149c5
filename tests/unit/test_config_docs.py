from pathlib import Path

from laminar.config.base import sections_of
from laminar.config.docs import configuration_page
from laminar.config.run_config import RunConfig

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def _keys(section, path: str = "") -> list[str]:
    keys = []
    for name, field in section.model_fields.items():
        below = sections_of(field.annotation)
        keys += [key for one in below for key in _keys(one, f"{path}{name}.")] if below else [f"{path}{name}"]
    return keys


def test_the_committed_page_is_the_generated_one():
    assert PAGE.read_text(encoding="utf-8") == configuration_page(), "run: python -m laminar.config.docs"


def test_every_key_has_a_row_with_type_default_and_meaning():
    page = configuration_page()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    for key in _keys(RunConfig):
        if not key.endswith(".kind"):
            assert any(row.startswith(f"| `{key}` |") for row in rows), key
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split(" | ")]
        assert len(cells) == 4, row
        assert all(cells), row


def test_each_engine_has_a_section_of_its_own():
    page = configuration_page()
    for kind in ("torch", "scripted", "custom"):
        assert f"`rollout.engine`, `kind: {kind}`" in page
    assert "The default is `kind: torch`." in page
