"""The page of schedules is as the code has it."""

import pytest

from fp4graph.commands import schedules
from tests.docs.blocks import ROOT


@pytest.mark.long
@pytest.mark.compiler
def test_the_page_is_what_the_code_makes():
    assert (ROOT / "docs/schedules.md").read_text() == schedules.page(), (
        "run: python -m fp4graph.commands.schedules docs/schedules.md"
    )
