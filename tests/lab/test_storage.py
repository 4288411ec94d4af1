"""Records of statistics stay readable after a kill, on a full disk and in a resumed training; streams get them too."""

import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

import fp4graph
from fp4graph.lab import read
from fp4graph.lab.statistics.storage import FILE, Log
from tests.helpers.disks import files_no_larger_than


def row(step, value=1.0, site="a"):
    return {"step": step, "site": site, "tensor": "weight", "value": value}


def write(directory, rows, streams=(), **header):
    """Append rows one by one, and check that each is in the file at once, where a kill cannot lose it."""
    log = Log(directory, {"step": 0, **header}, *streams)
    for each in rows:
        log.append([each])
        assert json.loads((directory / FILE).read_bytes().splitlines()[-1])["step"] == each["step"]


def test_rows_are_read_as_they_were_written(tmp_path):
    write(tmp_path, [row(50, 1 / 3), row(100, float("nan")), row(100, 2.0, "b")], policy="p")
    recorded = read(tmp_path)
    assert (recorded.header["policy"], recorded.steps, recorded.sites) == ("p", [50, 100], ["a", "b"])
    assert [r["value"] for r in recorded.rows] == [0.333333, None, 2.0]
    series = recorded.series("value", site="a")
    assert series == {"step": [50], "site": ["a"], "tensor": ["weight"], "value": [0.333333]}


def test_worst_orders_by_the_mean_and_a_repr_is_short(tmp_path):
    rows = [(50, "a", 30.0), (50, "b", 10.0), (100, "a", 5.0), (100, "b", 12.0)]
    write(tmp_path, [{"step": n, "site": s, "tensor": "x", "snr_db": v, "bias": v} for n, s, v in rows], policy="p")
    recorded = read(tmp_path)
    assert recorded.worst() == [
        {"site": "b", "tensor": "x", "snr_db": 11.0, "worst": 10.0, "step": 50},
        {"site": "a", "tensor": "x", "snr_db": 17.5, "worst": 5.0, "step": 100},
    ]
    assert recorded.worst("bias", 1) == [{"site": "a", "tensor": "x", "bias": 17.5, "worst": 30.0, "step": 50}]
    with pytest.raises(fp4graph.Error, match="snr_db"):
        recorded.worst("snr")
    assert repr(recorded) == "Recorded('p': 4 rows, 2 sites, 2 records, steps 50 to 100)"
    pytest.importorskip("pandas")
    assert recorded.to_frame()["snr_db"].tolist() == [30.0, 10.0, 5.0, 12.0]


def stand_in(*methods):
    """Return a stand-in for a tracker; its ``calls`` has the arguments of each call of its methods."""
    tracker = SimpleNamespace(calls=[])
    for method in methods:
        setattr(tracker, method, lambda *values, **options: tracker.calls.append((*values, *options.values())))
    return tracker


def test_streams_receive_every_number(tmp_path):
    run, tracking = stand_in("define_metric", "log"), stand_in("log_metrics")
    writer, called = stand_in("add_scalar"), []
    log = Log(tmp_path, {"step": 0}, run, tracking, writer, lambda step, values: called.append((step, values)))
    log.append([row(50, 1.5, "(root)#1") | {"counts": [1, 2], "window": 30}, row(50, math.inf)])
    first, second = "value/(root)#1/weight", "value/a/weight"
    values = {"fp4graph/step": 50, f"fp4graph/{first}": 1.5, f"fp4graph/{second}": math.inf}
    assert run.calls == [("fp4graph/*", "fp4graph/step"), (values,)]
    assert tracking.calls == [({"value/_root__1/weight": 1.5}, 50)]
    assert called == [(50, {first: 1.5, second: math.inf})]
    assert writer.calls == [(first, 1.5, 50), (second, math.inf, 50)]
    with pytest.raises(fp4graph.Error, match="cannot stream to 5"):
        Log(tmp_path, {"step": 0}, 5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_wandb_offline_has_the_values(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(project="statistics", mode="offline", dir=str(tmp_path)) as run:
        write(tmp_path, [row(step, step / 10) for step in (50, 100)], streams=[run])
        assert run.summary["fp4graph/value/a/weight"] == 10.0
        assert run.summary["fp4graph/step"] == 100


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mlflow_in_a_folder_has_the_values(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(f"file:{tmp_path}/mlruns")
    many = {f"c{i}": float(i) for i in range(1100)}
    with mlflow.start_run() as run:
        write(tmp_path, [row(step, step / 10, "(root)#1") | many for step in (50, 100)], streams=[mlflow])
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "value/_root__1/weight")
    assert [(each.step, each.value) for each in history] == [(50, 5.0), (100, 10.0)]


@pytest.mark.parametrize("keep", [0.2, 0.5, 0.99])
def test_a_line_that_a_kill_cut_off_is_left_out_and_cut_away(tmp_path, keep):
    write(tmp_path, [row(1), row(2)])
    file = tmp_path / FILE
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:-1]) + lines[-1][: int(keep * len(lines[-1]))])
    assert read(tmp_path).steps == [1]
    write(tmp_path, [row(3)], step=2)
    assert read(tmp_path).steps == [1, 3]
    for line in file.read_text().splitlines():
        json.loads(line)


def test_a_resumed_training_replaces_the_rows_after_its_step(tmp_path):
    write(tmp_path / "statistics", [row(50, 1.0), row(100, 1.0), row(150, 1.0)])
    write(tmp_path / "statistics", [row(100, 2.0)], step=80)
    for place in (tmp_path, tmp_path / "statistics" / FILE):  # the folder of the run will do too
        assert [(r["step"], r["value"]) for r in read(place).rows] == [(50, 1.0), (100, 2.0)]


@pytest.mark.long
def test_a_disk_that_fills_up_is_an_error_and_written_rows_stay(tmp_path):
    steps, says = itertools.count(1), "cannot write statistics to .*Earlier records are readable"
    rows = ({"step": step, "site": "a", "tensor": "weight", "values": list(range(200))} for step in steps)
    with files_no_larger_than(10_000), pytest.raises(fp4graph.Error, match=says):
        write(tmp_path, rows)
    assert read(tmp_path).steps == list(range(1, next(steps) - 1))
    assert (tmp_path / FILE).read_bytes().endswith(b"}\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "has no statistics"),
        ("", "has no statistics"),
        ('{"a": 1}\n', "not a line of statistics"),
        ('{"format": "fp4graph.statistics", "version": 99}\n', "another version"),
        ('{"format": "fp4graph.statistics", "version": 1}\n{oops\n', ":2 is not JSON"),
        ('{"format": "fp4graph.statistics", "version": 1}\n[1]\n', ":2 is not an object"),
    ],
)
def test_files_without_statistics_are_errors(tmp_path, text, message):
    if text is not None:
        (tmp_path / FILE).write_text(text)
    with pytest.raises(fp4graph.Error, match=message):
        read(tmp_path)


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    with pytest.raises(fp4graph.Error, match="cannot write statistics"):
        Log(Path(__file__) / "statistics", {})
    pytest.importorskip("tensorboard")
    with pytest.raises(fp4graph.Error, match="cannot write statistics to a stream"):
        Log(tmp_path, {}, Path(__file__) / "events")


def test_a_stream_that_fails_is_an_error_and_the_rows_stay(tmp_path):
    def fails(step, values):
        raise OSError("no connection")

    with pytest.raises(fp4graph.Error, match="cannot write statistics to a stream: no connection"):
        Log(tmp_path, {"step": 0}, fails).append([row(50)])
    assert read(tmp_path).steps == [50]
