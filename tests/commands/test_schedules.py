"""``docs/schedules.md`` is generated from the code."""

import pytest

from fp4graph.commands import schedules
from tests.docs.blocks import ROOT


@pytest.mark.long
@pytest.mark.compiler
def test_the_committed_page_is_what_the_code_generates():
    assert (ROOT / "docs/schedules.md").read_text() == schedules.page(), (
        "run: python -m fp4graph.commands.schedules docs/schedules.md"
    )
