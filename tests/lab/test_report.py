"""The report of a run: complete, self-contained, without complaints from a browser; and the statistics it shows."""

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
    """A folder as fp4graph train leaves it, with the statistics of a short training of two blocks."""
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


def test_it_holds_everything_and_refers_to_nothing_outside(page):
    text = page.read_text("utf-8")
    assert text.count("<svg") == len(PICTURES) + 2  # loss curves, other metrics
    parts = [f'<section id="{part.__name__}">' for part in PICTURES]
    sites = [f">{site}</th>" for site in ("0.up", "0.down", "1.up", "1.down")]
    for words in (*parts, *sites, "roll &lt;the&gt; rows", "Ω 0.5", "stochastic"):  # the last in the policy
        assert words in text
    outside = re.findall(r"""(?:src|href)\s*=\s*["'](?!#|data:)([^"']+)|url\((?!["']?#)([^)]+)\)|@import""", text)
    assert not outside


@pytest.mark.parametrize("part", PICTURES, ids=lambda part: part.__name__)
def test_pictures_have_labelled_axes_and_legends_inside_the_picture(part, run):
    """Nothing that is drawn reaches over the edge."""
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
def test_in_a_browser(page):
    """No console message, no error, no request."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")
    browser_path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser_path is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    said, asked = [], []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=browser_path, args=["--no-sandbox"], timeout=1000 * PATIENCE)
        tab = browser.new_page(viewport={"width": 1200, "height": 900})
        tab.set_default_timeout(1000 * PATIENCE)
        tab.on("console", lambda message: said.append(message.text))
        tab.on("pageerror", lambda error: said.append(str(error)))
        tab.on("request", lambda request: asked.append(request.url))
        tab.goto(page.resolve().as_uri())
        assert tab.title() == "roll <the> rows under tetrajet"
        drawn = tab.eval_on_selector_all("figure svg", "all => all.map(e => e.getBoundingClientRect().width)")
        assert len(drawn) == len(PICTURES) + 2
        assert min(drawn) > 500
        for width in (1200, 420):  # a phone scrolls tables and pictures, not the page
            tab.set_viewport_size({"width": width, "height": 900})
            assert tab.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), width
        browser.close()
    assert (said, asked) == ([], [page.resolve().as_uri()])


@pytest.mark.long
def test_statistics_without_a_run_by_the_command(command, run, tmp_path):
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


def test_a_run_without_statistics_and_one_that_diverged(run, tmp_path):
    for name in ("run.json", "metrics.jsonl"):
        shutil.copy(run / name, tmp_path)
    text = write_report(tmp_path).read_text("utf-8")
    for words in ("No statistics were recorded", "the run has not ended", "validation loss at step 100"):
        assert words in text
    assert "diverged" not in text
    lines = [{"step": 1, "train_loss": 2.0}, {"step": 2, "train_loss": None, "validation_loss": None}]
    record(tmp_path, lines, {"steps": 2, "seconds": 1.0, "diverged": True})
    assert "diverged" in write_report(tmp_path).read_text("utf-8")


def test_pictures_of_what_was_not_recorded(tmp_path):
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
def test_folders_that_hold_something_else(tmp_path, make, message):
    folder = tmp_path / "folder"
    folder.mkdir()
    make(folder)
    with pytest.raises(fp4graph.Error, match=message):
        write_report(folder)


DIGITS = ["train", "digits", "--policy=tetrajet", "--optimizer=adamw", "--validate-every=9", "--steps=12", "--json"]


@pytest.mark.long
@pytest.mark.slow
def test_a_training_and_its_report(command, tmp_path):
    """Statistics change nothing of the training, and the report has every picture."""
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
def test_a_resumed_run(tmp_path):
    """Goes on recording where the checkpoint is; what was recorded beyond it is recorded anew."""
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
    # All but what the window that began before the kill would have said, of weights and outputs.
    assert recorded.rows == tuple(row for row in expected.rows if row["tensor"] not in ("weight", "output"))


@pytest.mark.long
@pytest.mark.parametrize(("task", "policy"), [("text", "mxfp4"), ("digits-diffusion", "nvfp4"), ("gaussian", "mxfp4")])
def test_the_other_families(task, policy, tmp_path):
    """What goes into the model is the task's, noise and timesteps of a diffusion included."""
    small = {"batch_size": 4, "validation_batches": 1, "steps": 2}
    train(Run(task, policy=policy, device="cpu", **small), directory=tmp_path, statistics=2)
    rates = read(tmp_path).series("rate_of_change", tensor="output")["value"]
    assert min(rates) > 0


@pytest.mark.parametrize(("every", "says"), [(13, "from 1 to 12"), (0, "from 1 to 12"), (5, "kept in the folder of")])
def test_statistics_that_record_nothing(every, says, tmp_path):
    folder = None if every == 5 else tmp_path / "run"
    with pytest.raises(fp4graph.Error, match=says):
        train(Run("digits", policy="tetrajet", steps=12, device="cpu"), directory=folder, statistics=every)
    assert not (tmp_path / "run").exists()
