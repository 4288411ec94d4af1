"""The document's tables are those of the stored results, and the targets are looked up in them."""

import importlib
from unittest.mock import Mock

import pytest
import typer

pytest.importorskip("psutil", reason="benchmarks need the extra 'bench'")
pytest.importorskip("cpuinfo", reason="benchmarks need the extra 'bench'")

from benchmarks import linear, report, targets
from benchmarks.gpu.record import predictions
from benchmarks.report import generated
from benchmarks.results import RESULTS, file_of, load, write
from benchmarks.targets import TARGETS, held_against, rows_of

MACHINE = {
    "cpu": "Some CPU", "cores": 2, "logical_cores": 2, "threads": 2, "instructions": ["AVX512", "amx_bf16"],
    "ram_gib": 8.0, "gpu": None, "gpu_ram_gib": None, "system": "Linux",
}  # fmt: skip
RUN = {
    "date": "2026-01-02T03:04:05+00:00", "commit": "a" * 40, "dirty": True, "settings": {}, "load_average": 0.25,
    "versions": {"torch": "2.15.0", "torchao": None}, "cpu_kernels": False, "compiler": "g++ 12", "environment": {},
}  # fmt: skip
TINY = {"model": "deit-tiny", "batch": 16, "policy": "tetrajet", "backend": "inductor"}


def step(ratio, **case):
    figures = {
        "ratio": ratio, "quartiles": [ratio - 0.01, ratio + 0.01], "repeats": 12, "settled": False, "seconds": 1.0,
        "baseline_seconds": 0.5, "floor": 1.1, "quantized": 48, "sites": 62,
    }  # fmt: skip
    return {"run": "1", "case": {**TINY, "dtype": "float32", **case}, "figures": figures}


def written(folder, rows):
    file = file_of("step", MACHINE, folder)
    write(file, {"benchmark": "step", "machine": MACHINE, "runs": {"1": RUN}, "rows": rows})


def test_tables_come_from_the_files(tmp_path):
    failed = {"run": "1", "case": {**TINY, "dtype": "bfloat16"}, "figures": {"failed": "OSError: full"}}
    written(tmp_path, [step(1.234), step(9.0, backend="eager"), failed])
    text = generated(tmp_path)
    assert "### Some CPU, 2 threads" in text
    assert "Some CPU, 2 cores, 2 threads used, AVX512, amx_bf16; 8.0 GiB; Linux." in text
    assert "| deit-tiny | 16 | float32 | tetrajet | 1.23 | 1.22–1.24 ~ | 12 | 1000 | 500 | 1.1 | 48 of 62 |" in text
    assert "- deit-tiny, 16, bfloat16, tetrajet: not measured: OSError: full" in text
    assert "9.00" not in text  # a trial without compiling is no result
    assert "2 of 2 rows: 2026-01-02, commit aaaaaaaaaa with uncommitted changes; torch 2.15.0; " in text
    assert "; g++ 12, without CPU kernels; load before 0.25." in text


def test_predictions_at_other_rates_than_those_of_the_page_are_not_on_it(tmp_path):
    contents = load(next(RESULTS.glob("gpu_plan.*.json")))
    row = next(row for row in contents["rows"] if row["case"]["policy"] == "tetrajet")
    other = {**row, "case": {**row["case"], "gemm_rate": 9.0}}
    write(tmp_path / "gpu_plan.here.json", {**contents, "rows": [row, other]})
    assert report.predicted(tmp_path).count("| tetrajet |") == 1
    assert len(predictions(tmp_path)) == 1


def test_targets_are_met_missed_or_not_measured(tmp_path):
    written(tmp_path, [step(1.45), step(1.46, dtype="bfloat16"), step(1.0, batch=32)])
    verdicts = {line["what"]: line["verdict"] for line in held_against(rows_of(tmp_path, MACHINE), "cpu")}
    assert verdicts["DeiT-Tiny 224, batch 16, tetrajet, step, fp32"] == "met"
    assert verdicts["the same, bf16 autocast"] == "missed"
    assert verdicts["tetrajet linear 1024³, fp32"] == "not measured"
    assert len(verdicts) == 9
    assert len(list(held_against({}, "cuda"))) == 10
    # A peer must be slower, not as fast.
    target = next(target for target in TARGETS if "torchao" in target.what)
    row = {"case": {**target.case, "backend": "inductor"}, "figures": {"ratio": 1.0}}
    verdicts = {line["what"]: line["verdict"] for line in held_against({"linear": [row]}, "cpu")}
    assert verdicts[target.what] == "missed"


def test_only_text_between_the_marks_changes(tmp_path, capsys):
    document = tmp_path / "performance.md"
    plan = f"{report.PLAN_BEGIN}\nold\n{report.PLAN_END}\n"
    document.write_text(f"before\n{plan}between\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    options = [f"--folder={tmp_path}", f"--document={document}"]
    for arguments, code in ((["--check"], 1), ([], 0), (["--check"], 0)):
        with pytest.raises(SystemExit) as stop:
            report.app([*options, *arguments])
        assert stop.value.code == code
    plan = f"{report.PLAN_BEGIN}\n\nNothing has been predicted yet.\n\n{report.PLAN_END}\n"
    expected = f"before\n{plan}between\n{report.BEGIN}\n\nNothing has been measured yet.\n\n{report.END}\nafter\n"
    assert document.read_text() == expected
    with pytest.raises(typer.BadParameter, match="lacks the marks"):
        report.updated("no marks", "tables")


def test_the_document_is_up_to_date():
    text = report.DOCUMENT.read_text(encoding="utf-8")
    assert report.whole(text, report.RESULTS) == text, "run python -m benchmarks.report"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_commands_exist_and_measure_the_cases_of_the_targets(device):
    """The commands' options are parsed, and the commands are not run."""
    parsed = {}
    for name, *arguments in (*targets.COMMANDS[device], *targets.EVERYTHING):
        module = importlib.import_module(f"benchmarks.{name}")
        context = typer.main.get_command(module.app).make_context(name, [*arguments, f"--device={device}"])
        parsed.setdefault(name, []).append(context.params)
    for shapes in (run["shapes"] for run in parsed["linear"]):
        assert set(shapes.split(",")) <= linear.SHAPES.keys()
    for target in targets.TARGETS:
        if target.on != device:
            continue
        plural = {"shape": "shapes", "linear": "policies", "dtype": "dtypes", "model": "models", "policy": "policies"}
        wanted = {plural[name]: value for name, value in target.case.items() if name in plural}
        assert any(
            all(name not in run or value in run[name].split(",") for name, value in wanted.items())
            for run in parsed[target.benchmark]
        ), target


def test_the_folder_of_the_targets_is_that_of_their_commands(tmp_path, monkeypatch):
    """The commands run in the root of the clone, and the user elsewhere."""
    monkeypatch.chdir(tmp_path)
    commands = Mock(return_value=Mock(returncode=0))
    monkeypatch.setattr(targets.subprocess, "run", commands)
    with pytest.raises(SystemExit):
        targets.app(["--folder=figures"])
    given = {words[-1] for (words, *_), _ in commands.call_args_list if "-m" in words}
    assert given == {f"--folder={tmp_path / 'figures'}"}
