"""The report of a run: complete, in one file, and without errors in a browser; the statistics that it shows."""

import json
import re
import shutil

import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from torch import nn

import fp4graph
from fp4graph.lab import Statistics, read
from fp4graph.lab.pictures import plots
from fp4graph.lab.report import PICTURES, write_report
from fp4graph.lab.runs.train import Run, train
from tests.helpers.processes import PATIENCE
from tests.lab.trainings import Block, stop_at


def record(folder, lines, outcome):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "outcome.json").write_text(json.dumps(outcome))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a folder as ``fp4graph train`` leaves it, with the statistics of a short training of two blocks."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    policy = fp4graph.load_policy("tetrajet")
    model = fp4graph.apply(nn.Sequential(Block(), Block()), policy, backend="eager")
    optimizer = fp4graph.prepare_optimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    x = torch.randn(64, 32)
    lines = []
    with Statistics(model, optimizer, every=5, directory=folder / "statistics", window=4, probe=(x[:8],)):
        for step in range(1, 101):
            loss = (model(x) - x.roll(1, 0)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            lines.append({"step": step, "train_loss": loss.item(), "lr": 1e-2})
            if step % 20 == 0:
                lines.append({"step": step, "train_loss": 1.0, "validation_loss": loss.item(), "accuracy": step / 100})
    content = {
        "format": "fp4graph.run", "version": 1, "policy": policy.to_yaml(),
        "run": {"task": "roll <the> rows", "policy": "tetrajet"},
        "settings": {"optimizer": "adamw", "lr": 1e-2, "seed": 0},
    }  # fmt: skip
    outcome = {"steps": 100, "seconds": 3.0, "diverged": False, "complexity": 0.5, "quantized": 4, "sites": 4}
    record(folder, lines, outcome)
    (folder / "run.json").write_text(json.dumps(content))
    torch._dynamo.reset()
    return folder


@pytest.fixture(scope="module")
def page(run):
    return write_report(run)


def test_the_report_has_every_picture_site_and_setting_and_needs_no_other_file(page):
    text = page.read_text("utf-8")
    assert text.count("<svg") == len(PICTURES) + 2  # loss curves, other metrics
    parts = [f'<section id="{part.__name__}">' for part in PICTURES]
    sites = [f">{site}</th>" for site in ("0.up", "0.down", "1.up", "1.down")]
    for words in (*parts, *sites, "roll &lt;the&gt; rows", "Ω 0.5", "stochastic"):  # "stochastic" is in the policy
        assert words in text
    outside = re.findall(r"""(?:src|href)\s*=\s*["'](?!#|data:)([^"']+)|url\((?!["']?#)([^)]+)\)|@import""", text)
    assert not outside


def test_a_module_may_have_any_name(run, tmp_path):
    """This one has a tag of HTML and mathematics of matplotlib, whose legends leave out names that begin with _."""
    shutil.copytree(run / "statistics", tmp_path / "statistics")
    file = tmp_path / "statistics" / "statistics.jsonl"
    file.write_text(file.read_text("utf-8").replace('"0.up"', '"_up<b>$_^$"'), "utf-8")
    assert ">_up&lt;b&gt;$_^$</th>" in write_report(tmp_path).read_text("utf-8")
    (axes,) = plots.flips(read(tmp_path)).axes
    assert r" _up<b>\$_^\$" in [text.get_text() for text in axes.get_legend().get_texts()]


@pytest.mark.parametrize("part", PICTURES, ids=lambda part: part.__name__)
def test_pictures_have_labelled_axes_and_legends_inside_the_picture(part, run):
    picture = part(read(run))
    renderer = FigureCanvasAgg(picture).get_renderer()
    picture.draw_without_rendering()
    assert any(axes.get_xlabel() for axes in picture.axes if axes.get_visible())
    assert any(axes.get_ylabel() or axes.get_yticklabels() for axes in picture.axes)
    labels = [label for axes in picture.axes for label in (axes.xaxis.label, axes.yaxis.label) if label.get_text()]
    legends = [*picture.legends, *(axes.get_legend() for axes in picture.axes if axes.get_legend())]
    for thing in (*labels, *legends):
        box = thing.get_window_extent(renderer)
        assert min(box.x0, box.y0, picture.bbox.width - box.x1, picture.bbox.height - box.y1) >= -1, thing
    assert all(legend.get_texts() for legend in legends)


@pytest.mark.long
@pytest.mark.service
def test_a_browser_shows_the_report(page):
    """It logs no message and no error, and requests no other file."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")
    browser_path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser_path is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    messages, requests = [], []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=browser_path, args=["--no-sandbox"], timeout=1000 * PATIENCE)
        tab = browser.new_page(viewport={"width": 1200, "height": 900})
        tab.set_default_timeout(1000 * PATIENCE)
        tab.on("console", lambda message: messages.append(message.text))
        tab.on("pageerror", lambda error: messages.append(str(error)))
        tab.on("request", lambda request: requests.append(request.url))
        tab.goto(page.resolve().as_uri())
        assert tab.title() == "roll <the> rows under tetrajet"
        drawn = tab.eval_on_selector_all("figure svg", "all => all.map(e => e.getBoundingClientRect().width)")
        assert len(drawn) == len(PICTURES) + 2
        assert min(drawn) > 500
        for width in (1200, 420):  # a phone scrolls tables and pictures, not the page
            tab.set_viewport_size({"width": width, "height": 900})
            assert tab.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), width
        browser.close()
    assert (messages, requests) == ([], [page.resolve().as_uri()])


@pytest.mark.long
def test_the_command_reports_statistics_without_a_run(command, run, tmp_path):
    shutil.copytree(run / "statistics", tmp_path / "statistics")
    code, out, _ = command("report", tmp_path, "-o", tmp_path / "other.html")
    assert code == 0
    assert "open it in a browser" in out
    text = (tmp_path / "other.html").read_text("utf-8")
    assert text.startswith("<!doctype html>")
    assert f"<title>{tmp_path.name} under tetrajet</title>" in text
    assert "Curves" not in text
    with pytest.raises(fp4graph.Error, match="cannot write"):
        write_report(run, tmp_path / "other.html" / "page.html")


def test_a_run_without_statistics_and_a_diverged_run_are_reported(run, tmp_path):
    for name in ("run.json", "metrics.jsonl"):
        shutil.copy(run / name, tmp_path)
    text = write_report(tmp_path).read_text("utf-8")
    for words in ("No statistics were recorded", "the run has not ended", "validation loss at step 100"):
        assert words in text
    assert "diverged" not in text
    lines = [{"step": 1, "train_loss": 2.0}, {"step": 2, "train_loss": None, "validation_loss": None}]
    record(tmp_path, lines, {"steps": 2, "seconds": 1.0, "diverged": True})
    assert "diverged" in write_report(tmp_path).read_text("utf-8")


def test_metrics_without_records_have_no_picture(tmp_path):
    (tmp_path / "statistics.jsonl").write_text('{"format": "fp4graph.statistics", "version": 1, "every": 50}\n')
    recorded = read(tmp_path)
    assert all(part(recorded) is None for part in PICTURES)
    assert plots.losses([]) is None
    assert plots.other_metrics([]) is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, "has neither a run nor statistics"),
        (lambda folder: folder.rmdir(), "does not exist"),
        (lambda folder: (folder / "run.json").write_text("{"), "is not JSON"),
        (lambda folder: (folder / "statistics.jsonl").write_text("x\n"), "delete this line"),
    ],
)
def test_folders_without_a_readable_run_are_errors(tmp_path, make, message):
    folder = tmp_path / "folder"
    folder.mkdir()
    make(folder)
    with pytest.raises(fp4graph.Error, match=message):
        write_report(folder)


DIGITS = ["train", "digits", "--policy=tetrajet", "--optimizer=adamw", "--validate-every=9", "--steps=12", "--json"]


@pytest.mark.long
def test_the_command_records_statistics_and_reports_them(command, tmp_path):
    """The training is the same as without statistics, and the report has every picture."""
    plain = json.loads(command(*DIGITS, "--output", tmp_path / "plain").out)["outcome"]
    watched = json.loads(command(*DIGITS, "--output", tmp_path / "run", "--statistics", 4).out)["outcome"]
    for name in ("validation_loss", "train_loss", "metrics", "history"):
        assert watched[name] == plain[name], name
    recorded = read(tmp_path / "run")
    assert recorded.steps == [4, 8, 12]
    assert {row["step"] for row in recorded.rows if row["tensor"] == "weight"} == {12}  # a window at the end
    assert {row["tensor"] for row in recorded.rows} >= {"fprop.input", "wgrad", "output"}
    assert command("report", tmp_path / "run").code == 0
    page = (tmp_path / "run" / "report.html").read_text("utf-8")
    assert all(f'<section id="{part.__name__}">' in page for part in PICTURES)


@pytest.mark.long
def test_a_resumed_run_replaces_the_records_after_its_checkpoint(tmp_path):
    run = Run("digits", policy="tetrajet", optimizer="sgd", steps=8, validate_every=4, device="cpu")
    whole = train(run, directory=tmp_path / "whole", statistics=2)
    with pytest.raises(KeyboardInterrupt):
        train(run, directory=tmp_path / "run", statistics=2, tick=stop_at(7))
    assert read(tmp_path / "run").steps == [2, 4, 6]
    resumed = train(run, directory=tmp_path / "run", statistics=2, resume=True)
    assert resumed.validation_loss == whole.validation_loss
    recorded, expected = read(tmp_path / "run"), read(tmp_path / "whole")
    assert recorded.header["step"] == 4  # though plain SGD counts no steps
    assert recorded.steps == expected.steps == [2, 4, 6, 8]
    # Rows of weights and outputs come from a window of steps; the kill ended the window.
    assert recorded.rows == tuple(row for row in expected.rows if row["tensor"] not in ("weight", "output"))


@pytest.mark.long
@pytest.mark.parametrize(("task", "policy"), [("text", "mxfp4"), ("digits-diffusion", "nvfp4"), ("gaussian", "mxfp4")])
def test_outputs_are_probed_in_every_other_family(task, policy, tmp_path):
    """The probe is a batch of the task, with noise and timesteps where the task is diffusion."""
    small = {"batch_size": 4, "validation_batches": 1, "steps": 2}
    train(Run(task, policy=policy, device="cpu", **small), directory=tmp_path, statistics=2)
    rates = read(tmp_path).series("rate_of_change", tensor="output")["value"]
    assert min(rates) > 0


@pytest.mark.parametrize(("every", "says"), [(13, "from 1 to 12"), (0, "from 1 to 12"), (5, "kept in the folder of")])
def test_settings_under_which_statistics_would_record_nothing_are_errors(every, says, tmp_path):
    folder = None if every == 5 else tmp_path / "run"
    with pytest.raises(fp4graph.Error, match=says):
        train(Run("digits", policy="tetrajet", steps=12, device="cpu"), directory=folder, statistics=every)
    assert not (tmp_path / "run").exists()
