"""Notebooks run in an empty folder, and are stored without outputs."""

from __future__ import annotations

import nbclient
import nbformat
import pytest

from tests.docs.blocks import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

#: Words in the outputs of each notebook on which its text relies.
SHOWN = {
    "compare_recipes": ["bf16, seed 0: finished", "nvfp4: its loss is higher", "<img", "dgrad.grad_output"],
    "train_export_load": ["14 of 17 sites quantized", "Explicit is better than implicit.", "equal logits: True"],
    "why_did_it_diverge": ["grad_output at blocks.2.down is 0.0 dB", "tensor_scaling", "Nothing left its normal range"],
}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_output_is_stored(path):
    notebook = nbformat.read(path, 4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code), (
        f"clear the outputs: jupyter nbconvert --clear-output --inplace {path}"
    )


@pytest.mark.long
@pytest.mark.process
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_its_text_says(path, tmp_path):
    notebook = nbformat.read(path, 4)
    nbclient.execute(notebook, tmp_path, extra_arguments=["--log-level=ERROR"])
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    shown = "\n".join(output.get("text") or str(output.data.get("text/html", "")) for output in outputs)
    assert not [words for words in SHOWN[path.stem] if words not in shown], shown
    assert "PolicyWarning" not in shown
