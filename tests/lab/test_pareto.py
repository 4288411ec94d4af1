"""Results of a sweep: scores, the best of each family, the frontier, the figure, the exports and the progress."""

import csv
import io
import json
import math
import os
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from fp4graph.commands.sweep_tables import Progress, effects_table
from fp4graph.errors import Error
from fp4graph.files import replacing, write
from fp4graph.lab.sweeps.pareto import figure, png
from fp4graph.lab.sweeps.results import Effect, Results, Trial, best, effects, frontier, reference_loss, to_csv, to_json

RULES = ("text", "table")


def trial(number, loss, complexity, family="e8m0", state="complete", kind="trial", summary=None, reason=None, **chosen):
    result = {"outcome": state, "loss": loss, "seconds": 1.5, "metrics": {"accuracy": 0.5}, "reason": reason}
    return Trial(
        number=number, state=state, kind=kind, family=family, summary=summary or f"{family.upper()}, recipe {number}",
        key=str(number), complexity=complexity, policy="version: 1\n", run={}, worker="w", result=result,
        assignment={"scale format": family, **chosen},
    )  # fmt: skip


def made(trials, name="digits"):
    return Results.of(name, "digits", trials)


BASELINES = [trial(0, 2.0, 0, "Adam", kind="baseline", summary="Adam"),
             trial(1, 2.5, 0.5, "StableSPAM", kind="baseline", summary="StableSPAM")]  # fmt: skip
#: Ten configurations in two families, by hand: the reference is 2.
SWEEP = made(
    [
        *BASELINES,
        trial(2, 3.0, 0, kind="pure", summary="MXFP4"),  # S -0.5 by both rules
        trial(3, 1.9, 1.0),  # G 0.05: text 0.025, table 0.05
        trial(4, 1.8, 4.0),  # G 0.1: text 0.02, table 0.025; best loss
        trial(5, 2.2, 2.0),  # G -0.1: text -0.0333, table -0.2
        trial(6, None, 1.0, state="diverged"),
        trial(7, 2.4, 0, "e4m3", kind="pure", summary="NVFP4"),  # -0.2
        trial(8, 2.1, 3.0, "e4m3"),  # -0.05: text -0.0125, table -0.15
        trial(9, None, 1.0, "e4m3", state="failed", reason="out of memory"),
        trial(10, 1.0, 1.0, "e4m3", state="pruned"),
        trial(11, 2.02, 2.0, "e4m3"),  # -0.01: text -0.00333, table -0.02
    ]
)


def test_scores_by_both_rules_are_relative_to_the_better_complete_baseline():
    assert SWEEP.reference == 2.0
    diverged, zero = trial(0, None, 0, kind="baseline", state="diverged"), trial(0, 0.0, 0, kind="baseline")
    assert reference_loss([diverged, BASELINES[1], trial(2, 0.5, 0)]) == 2.5
    assert reference_loss([diverged, trial(2, 0.5, 0)]) is reference_loss([zero]) is None
    found = {s.trial.number: s.scores for s in SWEEP.trials}
    expected = {
        2: (-0.5, -0.5), 3: (0.025, 0.05), 4: (0.02, 0.025), 5: (-0.1 / 3, -0.2), 7: (-0.2, -0.2),
        8: (-0.0125, -0.15), 11: (-0.01 / 3, -0.02),
    }  # fmt: skip
    for number, pair in expected.items():
        assert [found[number][rule] for rule in RULES] == pytest.approx(pair)
    assert found[6] == {"text": -math.inf, "table": -math.inf}
    assert found[9] == found[10] == {"text": None, "table": None}
    without = made([t.trial for t in SWEEP.trials[2:]])
    assert {score for s in without.trials for score in s.scores.values()} == {None}


def test_the_best_of_each_family():
    assert [(family, what, s.trial.number) for family, what, s in best(SWEEP, "table")] == [
        ("Adam", "baseline", 0), ("StableSPAM", "baseline", 1),
        ("e8m0", "pure FP4", 2), ("e8m0", "best loss", 4), ("e8m0", "best score > 0", 3), ("e8m0", "best score ≤ 0", 5),
        ("e4m3", "pure FP4", 7), ("e4m3", "best loss", 11), ("e4m3", "best score ≤ 0", 11),
    ]  # fmt: skip
    unscored = made([t.trial for t in SWEEP.trials[2:4]])
    assert [(what, s.trial.number) for _, what, s in best(unscored, "table")] == [("pure FP4", 2), ("best loss", 3)]


_POINTS = st.lists(
    st.tuples(st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.5, 4.0]), st.sampled_from([0.5, 1.5, 1.9, 2.0, 2.1, 3.0, None])),
    max_size=12,
)


@pytest.mark.slow
@given(_POINTS, st.sampled_from(RULES))
def test_the_frontier_holds_the_trials_that_no_other_dominates(points, rule):
    """Against the definition, over all pairs. Of equal points the frontier holds the first."""
    trials = [
        trial(number, loss, complexity, state="complete" if loss else "diverged")
        for number, (complexity, loss) in enumerate(points, 2)
    ]
    scored = [s for s in made([*BASELINES, *trials]).trials if s.trial.kind == "trial"]
    value = {s.trial.number: s.scores[rule] for s in scored}

    def dominates(a, b):
        first, second = (a.complexity, -value[a.number]), (b.complexity, -value[b.number])
        no_worse = all(x <= y for x, y in zip(first, second, strict=True))
        return no_worse and (first != second or a.number < b.number)

    finite = [s.trial for s in scored if math.isfinite(value[s.trial.number])]
    expected = [b.number for b in finite if not any(dominates(a, b) for a in finite)]
    front = [s.trial for s in frontier(scored, rule)]
    assert sorted(t.number for t in front) == expected
    assert front == sorted(front, key=lambda t: t.complexity)


@pytest.mark.parametrize("rule", RULES)
def test_the_figure_names_its_axes_its_families_and_its_best_points(rule):
    drawn = figure([SWEEP, made([t.trial for t in SWEEP.trials], "other")], rule)
    axes, _ = drawn.axes
    counts = "7 configurations, 1 diverged"
    assert [each.get_title() for each in drawn.axes] == [f"digits, {counts}", f"other (digits), {counts}"]
    assert axes.get_xlabel() == "complexity Ω [points]"
    assert axes.get_ylabel().startswith("score S = G/")
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["MXFP4", "NVFP4", "unquantized"]
    money = figure([made([*BASELINES, trial(2, 1.9, 1.0, "$a$", summary="$b$")], "$c$")], rule).axes[0]
    texts = [money.title, *money.get_legend().get_texts(), *money.texts]
    assert [text.get_text().replace(r"\$", "").count("$") for text in texts] == [0] * len(texts)
    with pytest.raises(Error, match=r"study 'digits' has nothing to plot.*0 complete trials, 1 diverged"):
        figure([made([trial(2, None, 0, state="diverged")])], rule)
    with pytest.raises(Error, match="nothing to plot"):
        png([made(BASELINES)])
    shown = "\n".join(text.get_text() for text in axes.texts)
    for family in ("e8m0", "e4m3"):
        named = frontier([s for s in SWEEP.complete if s.trial.family == family], rule)
        assert named
        for s in named:
            figures = f"Ω {s.trial.complexity:g}, S {s.scores[rule]:+.3g}, loss {s.trial.loss:.4g}"
            assert f"trial {s.trial.number}, {figures}: {s.trial.summary}" in shown


@pytest.mark.slow
def test_the_texts_of_the_figure_lie_inside_it_and_do_not_overlap():
    many = [trial(n, 2.0 - 0.001 * n, 0.5 * n, "e8m0", summary="MXFP4, " + "long words " * 12) for n in range(2, 10)]
    many += [trial(20 + n, 2.1 - 0.003 * n, 0.5 * n, "e4m3", summary="NVFP4") for n in range(2, 10)]
    drawn = figure([made([*BASELINES, *many])] * 2, "text")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(drawn)
    canvas.draw()
    renderer = canvas.get_renderer()
    width = canvas.get_width_height()[0]
    named = [t for t in drawn.axes[0].texts if t.xycoords == "axes fraction"]
    assert len(named) == 24  # 8 names take one line each, 8 take two
    assert " ".join(t.get_text().strip() for t in named).count("long words " * 11 + "long words") == 8  # none is cut
    box = drawn.get_tightbbox(renderer)  # of all that is drawn, in inches
    size = drawn.get_size_inches()
    assert min(box.x0, box.y0, size[0] - box.x1, size[1] - box.y1) >= 0
    lines = [t.get_window_extent(renderer) for t in named]
    below = drawn.axes[0].xaxis.label.get_window_extent(renderer)
    assert all(a.y0 >= b.y1 for a, b in zip([below, *lines], lines, strict=False))
    right = drawn.axes[1].yaxis.label.get_window_extent(renderer)
    assert max(line.x1 for line in lines) <= right.x0 + width / 4  # names stay under their panel


def test_the_frontier_stays_readable_beside_a_trial_that_is_far_worse():
    many = [trial(n, 1.99 - 0.02 * n, n, "e8m0") for n in range(2, 6)] + [trial(9, 500.0, 3)]
    drawn = figure([made([*BASELINES, *many])], "table")
    (axes,) = drawn.axes
    drawn.canvas.draw()
    places = [offset for scatter in axes.collections for offset in scatter.get_offsets().tolist()]
    low, high = axes.get_ylim()
    assert all(low < score < high for _, score in places)
    assert min(score for _, score in places) < -500
    heights = axes.transAxes.inverted().transform(axes.transData.transform([(2, 0.01), (2, 0.018)]))[:, 1]
    assert heights[1] - heights[0] > 0.01  # of the panel's height; on a linear axis it would be 1e-5
    assert [label.get_text() for label in axes.get_yticklabels() if label.get_text() in ("0", "-100")] == ["-100", "0"]


def test_effects_of_each_choice():
    results = made(
        [
            *BASELINES,
            trial(2, 3.0, 1, rounding="nearest", optimizer="adam"),
            trial(3, 1.0, 1, rounding="up", optimizer="adam"),
            trial(4, 2.0, 1, rounding="nearest", optimizer="stable"),
            trial(5, None, 1, rounding="up", optimizer="stable", state="diverged"),
            trial(6, 1.5, 1, rounding="up"),  # without a choice of optimizer
            trial(7, 9.0, 1, rounding="up", state="pruned"),
            trial(8, 9.0, 1, rounding="up", state="refused"),
            trial(9, 4.0, 1, "e4m3", rounding="up"),
        ]
    )
    assert effects(results) == [
        Effect("e8m0", "rounding", "nearest", 2, 0, 2.5, 2.0),
        Effect("e8m0", "rounding", "up", 3, 1, 1.5, 1.0),
        Effect("e8m0", "optimizer", "adam", 2, 0, 2.0, 1.0),
        Effect("e8m0", "optimizer", "stable", 2, 1, math.inf, 2.0),
    ]
    data = json.loads(to_json([results], choices=True))["choices"]
    rows = [(row["choice"], row["median"], row["best"]) for row in data]
    assert rows[1:] == [("up", 1.5, 1.0), ("adam", 2.0, 1.0), ("stable", None, 2.0)]
    printed = io.StringIO()
    Console(width=100, file=printed).print(effects_table(results))
    lines = printed.getvalue().splitlines()
    assert [line.split("│")[3].strip() for line in lines if line.startswith("│")] == ["nearest", "up", "adam", "stable"]
    assert "inf" in lines[-2]


def test_exports_hold_every_trial():
    rows = list(csv.DictReader(io.StringIO(to_csv([SWEEP]))))
    assert [int(row["trial"]) for row in rows] == list(range(12))
    assert [row["state"] for row in rows].count("diverged") == 1
    (failed,) = [row for row in rows if row["state"] == "failed"]
    assert (failed["reason"], failed["score_text"], failed["validation_loss"]) == ("out of memory", "", "")
    row = rows[3]
    assert [float(row["score_text"]), float(row["score_table"])] == pytest.approx([0.025, 0.05])
    assert (row["choices.scale format"], row["metrics.accuracy"]) == ("e8m0", "0.5")
    trials = json.loads(to_json([SWEEP, SWEEP]))["trials"]
    assert len(trials) == 24
    assert trials[6]["score_table"] is None  # JSON has no infinity
    assert (trials[3]["policy"], trials[3]["reference_loss"]) == ("version: 1\n", 2.0)


def test_a_file_is_written_whole_or_stays_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "results.csv"
    write(path, "first")

    monkeypatch.setattr("os.fsync", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(Error, match=r"cannot write .*results\.csv: No space left on device"):
        write(path, "second, longer")
    assert (path.read_text(), os.listdir(path.parent)) == ("first", ["results.csv"])
    monkeypatch.undo()
    (path.parent / "results.csv.tmp").write_text("what a kill left")  # the next writer overwrites it
    write(path, "third")
    assert (path.read_text(), os.listdir(path.parent)) == ("third", ["results.csv"])
    with replacing(path) as last:  # writers of one file do not disturb each other
        last.write(b"last")
        with replacing(path) as first:
            first.write(b"first, and longer")
        assert path.read_bytes() == b"first, and longer"
    assert (path.read_bytes(), os.listdir(path.parent)) == (b"last", ["results.csv"])
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(Error, match="pipe: not a regular file"):
        write(tmp_path / "pipe", "text")


def test_on_a_terminal_the_progress_is_a_table_with_a_line_for_every_trial():
    running = trial(12, None, 3.0, "e4m3", state="running", summary="NVFP4, " + "long words " * 20)
    console = Console(width=100, height=40, force_terminal=True, color_system=None, file=io.StringIO(), markup=False)
    with Progress(console, 40, "table", "digits") as progress:
        progress.show([s.trial for s in SWEEP.trials][:5])
        progress.show([*(s.trial for s in SWEEP.trials), running], ["worker 1 ended (SIGKILL)"])
    shown = console.file.getvalue()
    last = shown[shown.rindex("digits: ") :]
    assert last.startswith("digits: 12 of 40, about")
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in last.splitlines() if line.startswith("│")]
    assert lines[0] == ["0", "Adam (baseline)", "0", "2", "", "complete"]
    assert lines[3] == ["3", "E8M0, recipe 3", "1", "1.9", "+0.0500", "complete"]
    assert lines[6] == ["6", "E8M0, recipe 6", "1", "–", "-inf", "diverged"]
    assert lines[9] == ["9", "E4M3, recipe 9", "1", "–", "–", "failed"]
    assert (lines[12][0], lines[12][2], lines[12][5]) == ("12", "3", "running")
    assert lines[12][1].endswith("…")
    assert len(lines) == 13
    assert "best loss   trial 4" in last
    assert "best score  trial 3" in last
    assert "worker 1 ended (SIGKILL)" in shown


def test_without_a_terminal_the_progress_prints_every_result_once():
    console = Console(width=100, file=io.StringIO(), markup=False)
    with Progress(console, 40, "text", "digits") as progress:
        for count in (3, 3, 12):
            progress.show([s.trial for s in SWEEP.trials][:count])
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 12
    assert lines[0] == "3/40  trial 0  Adam  Ω 0  loss 2"
    assert lines[3] == "12/40  trial 3  E8M0, recipe 3  Ω 1  loss 1.9  score +0.0250"
    assert lines[9] == "12/40  trial 9  E4M3, recipe 9  Ω 1  failed: out of memory"
