"""The operations guide names a test for each scenario, and each of them is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NUM_SCENARIOS = 15


def test_every_scenario_of_the_operations_guide_has_a_test_that_exists() -> None:
    rows = re.findall(r"^\| (R\d+) \| .*$", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE)
    assert rows == [f"R{n}" for n in range(1, NUM_SCENARIOS + 1)]
    for line in (ROOT / "docs" / "operations.md").read_text().splitlines():
        if not re.match(r"\| R\d+ \|", line):
            continue
        named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", line)
        assert named, f"no test in: {line}"
        for path, name in named:
            source = (ROOT / path).read_text()
            assert not name or f"def {name}(" in source, f"{path} has no {name}"
