"""A sweep trains every configuration once and records every result, whichever process is killed."""

import contextlib
import dataclasses
import itertools
import json
import os
import re
import signal
import sqlite3
import subprocess
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import optuna
import pytest
from optuna.storages import RDBStorage
from sqlalchemy.engine import URL

import fp4graph
from fp4graph.commands.sweep import export, interrupts
from fp4graph.commands.sweep_results import read
from fp4graph.errors import Error, PolicyError
from fp4graph.lab.runs.run import Run
from fp4graph.lab.sweeps import database
from fp4graph.lab.sweeps import workers as workers_module
from fp4graph.lab.sweeps.space import parse_space
from fp4graph.lab.sweeps.study import Manifest, Study, TakenOver
from fp4graph.lab.sweeps.workers import Job, Workers, propose, work
from tests.helpers.processes import IMPORTS, PATIENCE, python
from tests.helpers.processes import run as run_process
from tests.lab import toy

RUN = Run("digits", steps=1, device="cpu")
SMALL = """\
version: 1
name: small
base: mxfp4
family: format
baselines: {exact: {}}
parameters:
  format: {choices: {mxfp4: {}, nvfp4: {quantize: {block: 16, scale: {format: e4m3}}}}}
  average: {choices: {none: {}, ema: {techniques: [q_ema]}}}
  second: {choices: {none: {}, ramping: {techniques: [{q_ramping: {t_update: 99, n_max: 4}}]}}}
  lr: {choices: {fine: {}, too high: {run: {lr: 2.0}}, raises: {run: {batch_size: 13}}}}
"""


@pytest.fixture(autouse=True)
def quiet():
    """Check that the threads of claims end with their trials."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    before = threading.active_count()
    yield
    assert threading.active_count() <= before + 1


@pytest.fixture(scope="module")
def small():
    return parse_space(SMALL, "small.yaml")


@pytest.fixture
def folder(tmp_path):
    """Return a folder in memory if the machine has one: on a disk, SQLite waits at every step."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as made:
        yield Path(made)


@pytest.fixture
def url(folder):
    return f"sqlite:///{folder / 'sweep.db'}"


@pytest.fixture
def study(url, table10):
    return make(url, table10)


def make(url, space, *, run=RUN, patience=60.0, pruner="none", name="s"):
    return Study.create(url, name, Manifest.of(space, run.to_json(), patience), pruner)


def one_worker(url, folder, study, objective):
    return Workers(Job(url, "s", 3, "random", "none", "cpu", str(folder), workers=1, objective=objective), study)


def claimed(study, space, configuration=None, target=9):
    """Claim a configuration, by default the next, for a worker on another machine that sends no heartbeat."""
    return study.claim(configuration or propose(space, study.trials(), 0), space, "elsewhere:1", target)


def first_heartbeat_fails(monkeypatch):
    """Raise the error of a database that is away at the first heartbeat; return a list of the later ones."""
    record, away, recorded = RDBStorage.record_heartbeat, iter([True]), []

    def once_away(storage, identifier):
        if next(away, False):
            raise optuna.exceptions.StorageInternalError("away")
        recorded.append(identifier)
        record(storage, identifier)

    monkeypatch.setattr(RDBStorage, "record_heartbeat", once_away)
    return recorded


def counted(study):
    return [trial for trial in study.trials() if trial.counts]


def states(study):
    return [trial.state for trial in study.trials()]


@contextlib.contextmanager
def database_away(study, url):
    """Put another file in the database's place; ``study`` gives up after 0.3 seconds."""
    path = Path(url.removeprefix("sqlite:///"))
    saved, study.storage.ask_again = path.read_bytes(), 0.3
    study.storage.engine.dispose()
    path.write_bytes(b"no database any more" * 100)
    try:
        yield
    finally:
        path.write_bytes(saved)


def test_the_order_is_baselines_pure_configurations_and_draws_by_the_seed(url, study, table10):
    """The first of the three sweeps is resumed twice, without effect on its order."""
    for target in (5, 5, 8):
        work(make(url, table10), table10, target, objective=toy.objective)
    studies = [study, make(url, table10, name="again")]
    studies.append(make(url, table10, name="seeded", run=dataclasses.replace(RUN, seed=1)))
    for each in studies[1:]:
        work(each, table10, 8, objective=toy.objective)
    trials = study.trials()
    assert [t.kind for t in trials] == ["baseline"] * 2 + ["pure"] * 2 + ["trial"] * 4
    assert [t.summary for t in trials[:4]] == ["Adam", "StableSPAM", "MXFP4", "NVFP4"]
    assert set(states(study)) == {"complete"}
    keys, again, seeded = ([t.key for t in each.trials()] for each in studies)
    assert len(set(keys)) == 8
    assert again == keys
    assert len(set(seeded) & set(keys)) == 4  # baselines and pure ones


def test_only_baselines_begin_until_one_of_them_has_ended(study, table10):
    claims = [claimed(study, table10) for _ in range(2)]
    assert [trial.summary for trial in study.trials()] == ["Adam", "StableSPAM"]
    assert propose(table10, study.trials(), 0) is None
    study.finish(claims[1].number, {"outcome": "diverged", "loss": None})
    assert propose(table10, study.trials(), 0).summary == "MXFP4"


def test_a_sweep_ends_with_its_space_and_records_every_result(url, small, capsys):
    """The space has a baseline and 24 configurations; 6 of these combine techniques that conflict."""
    study = make(url, small)
    work(study, small, 1000, objective=toy.objective)
    assert Counter(states(study)) == {"complete": 7, "diverged": 6, "failed": 6, "refused": 6}
    assert len({trial.key for trial in study.trials()}) == len(study.trials()) == 25
    for trial in study.trials():
        if trial.state == "refused":
            assert trial.complexity is None
            assert all(name in trial.result["reason"] for name in ("q_ramping", "q_ema"))
        elif trial.state == "failed":
            assert (trial.run, trial.result["reason"]) == ({"batch_size": 13}, "ZeroDivisionError: thirteen")
        elif trial.state == "diverged":
            assert (trial.run, trial.loss) == ({"lr": 2.0}, None)
        else:
            assert trial.result["history"][0]["validation_loss"] == trial.loss == trial.reports[-1]
    assert "thirteen" in capsys.readouterr().err  # the traceback, in the worker's log
    # Optuna's own view: only what is complete has a value.
    frozen = optuna.load_study(study_name="s", storage=url).trials
    assert sum(trial.value is not None for trial in frozen) == 7
    assert frozen[5].params.keys() <= {"format", "average", "second", "lr"}

    def healed(run, report):
        return toy.objective(dataclasses.replace(run, batch_size=None), report)

    assert study.excuse_failed() == 6  # on request, failed configurations run again
    work(make(url, small), small, 1000, objective=healed)
    assert Counter(states(study)) == {"complete": 13, "diverged": 6, "refused": 6, "withdrawn": 6}


@pytest.mark.long
@pytest.mark.parametrize(("space", "target"), [("small", 19), ("table10", 17)])
def test_tpe_suggests_configurations_of_the_space_and_none_twice(space, target, url, request):
    searched = request.getfixturevalue(space)
    study = make(url, searched)
    work(study, searched, target, sampler="tpe", objective=toy.objective)
    trials = study.trials()
    assert len({trial.key for trial in trials}) == len(trials)
    assert all(searched.contains(trial.assignment) for trial in trials if trial.kind == "trial")
    assert len(counted(study)) == target


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_failed_configurations_run_again_before_new_ones(sampler, url, table10):
    study, number = make(url, table10), itertools.count()

    def fails_twice(run, report):
        if next(number) in (5, 6):
            raise OSError("the disk is full")
        return toy.objective(run, report)

    work(study, table10, 9, sampler=sampler, objective=fails_twice)
    failed = {trial.key for trial in study.trials() if trial.state == "failed"}
    assert (len(failed), study.excuse_failed()) == (2, 2)
    work(make(url, table10), table10, 9, sampler=sampler, objective=toy.objective)
    assert {trial.key for trial in study.trials()[9:]} == failed


def misfit(run, report, least=0.0):
    """Refuse policies whose complexity is ``least`` or more."""
    policy = fp4graph.load_policy(run.policy)
    if policy.quantizes and policy.complexity >= least:
        raise PolicyError("rule 'transformer linears' matched nothing")
    return toy.objective(run, report)


@pytest.mark.parametrize(
    ("objective", "error", "says", "completed"),
    [
        (toy.broken_baseline, Error, "the baseline 'Adam' failed, and so would all others: no data; put it there", 0),
        (misfit, Error, r"the plain configuration 'MXFP4' failed.*matched nothing", 2),
        (Mock(side_effect=KeyboardInterrupt), KeyboardInterrupt, None, 0),
    ],
    ids=["a failing baseline", "a plain policy that does not fit", "an interrupt"],
)
def test_an_error_or_interrupt_that_ends_a_sweep_withdraws_its_trial(objective, error, says, completed, study, table10):
    with pytest.raises(error, match=says):
        work(study, table10, 9, objective=objective)
    assert states(study) == ["complete"] * completed + ["withdrawn"]
    work(study, table10, 4, objective=toy.objective)
    assert states(study) == ["complete"] * completed + ["withdrawn"] + ["complete"] * (4 - completed)


def test_other_policies_that_do_not_fit_the_model_are_refused_one_by_one(study, table10):
    work(study, table10, 9, objective=partial(misfit, least=9.0))
    complexities = {state: [t.complexity for t in study.trials() if t.state == state] for state in states(study)}
    assert len(complexities["complete"]) == 9
    assert max(complexities["complete"]) < 9 <= min(complexities["refused"])


def test_pruning_ends_trials_but_no_baseline_and_no_pure_configuration(url, table10):
    def worsening(run, report):
        """Report a loss that rises with the complexity of the policy."""
        complexity = fp4graph.load_policy(run.policy).complexity
        for step in range(1, 5):
            report(10 * step, 1.0 + complexity)
        return dataclasses.replace(toy.objective(run, lambda *_: None), validation_loss=1.0 + complexity)

    study = make(url, table10, pruner="median")
    work(study, table10, 13, objective=worsening)
    pruned = [trial for trial in study.trials() if trial.state == "pruned"]
    assert {trial.kind for trial in pruned} == {"trial"}
    assert all(len(trial.reports) < 4 and trial.loss == trial.reports[-1] for trial in pruned)
    assert all(s.scores["table"] is None for s in study.results().trials if s.trial.state == "pruned")
    other = make(url, table10, name="h", pruner="hyperband")
    work(other, table10, 7, objective=worsening)
    assert len(counted(other)) == 7


def test_the_trial_of_a_silent_worker_is_taken_up_and_its_late_result_dropped(url, table10):
    study = make(url, table10, patience=1.0)
    claim = claimed(study, table10)
    work(make(url, table10), table10, 3, objective=toy.objective)
    assert states(study)[0] == "lost"
    assert len(counted(study)) == 3
    assert study.trials()[0].key in {trial.key for trial in counted(study)}
    with pytest.raises(TakenOver):
        claim.report(1.0, 0)
    with pytest.raises(TakenOver):
        study.finish(claim.number, {"outcome": "complete", "loss": 1.0})
    assert states(study)[0] == "lost"


@pytest.mark.long
def test_the_trial_of_a_worker_that_sends_heartbeats_goes_on(url, table10, monkeypatch):
    patience = 4.0  # four times the interval of heartbeats, which a busy machine delays
    study = make(url, table10, patience=patience)
    claim = claimed(study, table10)
    until = time.monotonic() + 2 * patience
    recorded = first_heartbeat_fails(monkeypatch)  # which would end Optuna's thread
    with study.beating(claim.number):
        while time.monotonic() < until:
            study.lose_silent(study.trials())
            time.sleep(0.1)
    assert states(study) == ["running"]
    assert recorded


def test_an_observer_sends_the_first_heartbeat_until_the_database_has_it(study, table10, monkeypatch):
    claim, recorded = claimed(study, table10), first_heartbeat_fails(monkeypatch)
    study.lose_silent(study.trials())
    study.lose_silent(study.trials())
    assert recorded == [claim._trial_id]


def test_a_result_whose_writer_died_before_telling_optuna_is_kept(study, table10):
    claim = claimed(study, table10)
    study._tell = lambda *_: None  # killed here
    study.finish(claim.number, {"outcome": "complete", "loss": 1.25})
    del study._tell
    work(study, table10, 3, objective=toy.objective)
    study.lose(0)  # as Optuna does when no heartbeat comes
    assert states(study) == ["complete"] * 3
    assert study.trials()[0].loss == 1.25


def test_a_configuration_that_takes_its_workers_down_is_recorded_as_failed(study, table10):
    work(study, table10, 3, objective=toy.objective)
    fatal = propose(table10, study.trials(), 0)
    for _ in range(3):
        study.lose(claimed(study, table10, fatal).number)
    work(study, table10, 5, objective=toy.objective)
    assert states(study) == [*["complete"] * 3, *["lost"] * 3, "failed", "complete"]
    assert study.trials()[6].key == fatal.key
    assert study.trials()[6].result["reason"] == "3 workers ended while they trained this configuration"


class NotThere:
    """An objective that ends the process that unpickles it."""

    __call__ = None

    def __reduce__(self):
        return os._exit, (1,)


@pytest.mark.long
@pytest.mark.process
@pytest.mark.parametrize(
    ("objective", "says"),
    [
        (NotThere(), r"worker 0 ended \(exit status 1\).*worker-0.log"),
        (toy.broken_baseline, r"the baseline 'Adam' failed.*no data; put it there"),
    ],
    ids=["exit", "baseline"],
)
def test_workers_that_end_at_once_are_not_started_forever(objective, says, tmp_path, url, study):
    with one_worker(url, tmp_path, study, objective) as workers, pytest.raises(Error, match=says):
        list(workers.watch())


@pytest.mark.long
@pytest.mark.process
def test_workers_ignore_ctrl_c_from_their_first_moment_on(tmp_path, url, study):
    with one_worker(url, tmp_path, study, toy.objective) as workers:
        (worker,) = workers._running.values()
        os.kill(worker.process.pid, signal.SIGINT)  # as it begins to import
        events = [event for _, some in workers.watch() for event in some]
    assert events == []
    assert states(study) == ["complete"] * 3
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.fixture
def sigint():
    """Set Python's handler of SIGINT, which processes in the background of a shell ignore."""
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, inherited)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_is_noted_and_a_later_one_raises(number, sigint, monkeypatch, capfd):
    """Raised at once, 4 of 200 interrupts fell into a read and left the database locked and trials running."""
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch, interrupts() as asked:
        assert not asked
        patch.setattr(time, "monotonic", lambda: 100.0)  # seconds may pass between two lines on a busy machine
        signal.raise_signal(number)
        signal.raise_signal(number)  # as a key that is pressed twice
        assert asked
        assert capfd.readouterr().err.count("stopping") == 1
        patch.setattr(time, "monotonic", lambda: 160.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a signal that the shell ignores stays ignored
    with interrupts() as asked:
        signal.raise_signal(signal.SIGINT)
        assert not asked


@pytest.mark.long
@pytest.mark.process
def test_workers_that_end_with_the_sweep_are_not_reported_as_lost(tmp_path, url, study):
    """A supervisor signals the whole process group, so that workers end before the sweep looks."""
    with interrupts() as asked, one_worker(url, tmp_path, study, toy.slow) as workers:
        for trials, events in workers.watch(lambda: bool(asked)):
            assert not events
            if any(trial.state == "running" for trial in trials):
                (worker,) = workers._running.values()
                signal.raise_signal(signal.SIGTERM)
                os.kill(worker.process.pid, signal.SIGTERM)
                worker.process.join()
    assert states(study) == ["withdrawn"]


def test_of_many_claims_to_one_configuration_one_is_granted(url, table10):
    studies = [make(url, table10) for _ in range(4)]
    configuration = table10.configuration(next(iter(table10.assignments())))
    barrier = threading.Barrier(4)

    def granted(study):
        barrier.wait()
        claim = study.claim(configuration, table10, "w", 40)
        study.storage.remove_session()
        return claim is not None

    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(granted, studies)) == [False, False, False, True]
    assert Counter(states(studies[0])) == {"running": 1, "withdrawn": 3}


def test_no_more_trials_begin_than_the_target_needs(study, table10):
    every = map(table10.configuration, table10.assignments())
    claims = [claimed(study, table10, next(every), 2) for _ in range(3)]
    assert [claim is not None for claim in claims] == [True, True, False]
    study.lose(0)
    assert claimed(study, table10, next(every), 2) is not None


@pytest.mark.long
@pytest.mark.process
def test_after_a_kill_of_everything_nothing_is_lost_and_nothing_run_twice(url, table10, tmp_path):
    log, hold = tmp_path / "trained", tmp_path / "hold"
    here = {"cwd": Path(toy.__file__).parent, "env": {**os.environ, **IMPORTS, "OMP_NUM_THREADS": "1"}}
    command = python(toy.__file__, url, log, "30", "120")
    killed = subprocess.Popen(command, start_new_session=True, **here)

    def wait(until):
        while not until():
            assert killed.poll() is None
            time.sleep(0.05)

    def trained():
        return log.read_text().split() if log.exists() else []

    wait(lambda: len(trained()) >= 4)
    hold.touch()
    wait(lambda: not hold.exists() and len(trained()) >= 8)
    # One of the two workers is now in the middle of a training; the other may be anywhere.
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    before = Study.open(url, "toy").trials()
    done = [trial for trial in before if trial.finished]
    assert 6 <= len(done) < 30
    assert "running" in {trial.state for trial in before}

    subprocess.run(command, check=True, **here)
    trials = Study.open(url, "toy").trials()
    counting = [trial for trial in trials if trial.counts]
    assert len(counting) == len({trial.key for trial in counting}) == 30
    assert {trial.state for trial in counting} == {"complete"}
    assert all(trials[trial.number] == trial for trial in done)
    # One training may be repeated: one that had ended, and whose result was not yet written at the kill.
    assert len(set(trained())) == 30
    assert len(trained()) - 30 <= 1


QUICK = ("--steps", "1", "--batch-size", "8", "--validation-batches", "1", "--backend", "eager", "--device", "cpu")
_command = partial(python, "-c", "from fp4graph.__main__ import main; main()")


@pytest.mark.long
@pytest.mark.process
@pytest.mark.parametrize(("kind", "target"), [("sqlite", 14), ("postgresql", 12)])
def test_the_command_on_two_workers_one_of_them_killed(kind, target, tmp_path, request):
    url = f"sqlite:///{tmp_path / 'sweep.db'}" if kind == "sqlite" else request.getfixturevalue("postgres").url
    output = tmp_path / "out"
    where = ("--storage", url, "--output", str(output))
    command = _command("sweep", "--task", "digits", "--trials", str(target), "--workers", "2", *where, *QUICK)
    if kind == "sqlite":  # SIGTERM stops a sweep as Ctrl-C does; background jobs of a shell may ignore SIGINT
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path)
        _a_worker(url, process, results=1)
        process.send_signal(signal.SIGTERM)
        shown, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 130
        assert f"of {target} results; the same command resumes" in shown
        assert set(states(Study.open(url, "digits"))) == {"complete", "withdrawn"}
    with (tmp_path / "printed").open("w+") as printed:
        process = subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT, cwd=tmp_path)
        os.kill(_a_worker(url, process), signal.SIGKILL)
        assert process.wait(PATIENCE) == 0, (tmp_path / "printed").read_text()
    shown = (tmp_path / "printed").read_text()
    for words in ("ended (SIGKILL); its trial is free again", f"{target}/{target}", "best per family"):
        assert words in shown
    assert "secret" not in shown

    study = Study.open(url, "digits")
    counting = counted(study)
    assert len(counting) == len({trial.key for trial in counting}) == target
    assert {trial.state for trial in counting} <= {"complete", "diverged"}
    assert len({trial.worker for trial in counting}) >= 3  # the killed one, its successor, and the other
    assert states(study).count("lost") == 1

    assert (output / "pareto.png").read_bytes().startswith(b"\x89PNG")
    assert len((output / "results.csv").read_text().splitlines()) == target + 1
    assert len(json.loads((output / "results.json").read_text())["trials"]) == target

    # The policy file of a trial is the policy that was trained.
    trial = next(t for t in study.trials() if t.state == "complete" and t.kind == "trial")
    command = _command("sweep", "--task", "digits", *where, "--export-policy", str(trial.number))
    written = Path(run_process(command, cwd=tmp_path).strip())
    assert f"validation loss {trial.loss:.6g}" in written.read_text()
    exported = fp4graph.load_policy(written)
    trained = parse_space(study.manifest.space, "study").configuration(trial.assignment).policy
    assert (exported.fingerprint, exported.complexity) == (trained.fingerprint, trial.complexity)


def _a_worker(url, process, results=4):
    """Return the pid of a worker that has just begun a trial, once ``results`` trials have ended."""
    study, known, fresh = None, 0, set()
    while True:
        assert process.poll() is None
        with contextlib.suppress(Error):
            # Opened once: a server has only so many connections, and a slow machine asks often.
            study = study or Study.open(url, "digits")
            trials = study.trials()
            # Trials that were new at the last look and still run: a claim to a claimed configuration ends at once.
            begun = [trial for trial in trials if trial.number in fresh and trial.state == "running"]
            if sum(trial.finished for trial in trials) >= results and begun:
                return int(begun[-1].worker.split(":")[-2])
            fresh = {trial.number for trial in trials[known:]}
            known = len(trials)
        time.sleep(0.1)


@pytest.mark.long
def test_a_restart_of_the_server_loses_no_trial(postgres, table10):
    study = make(postgres.url, table10, name="restarted")

    def objective(run, report):
        if len(study.trials()) == 3 and run.steps == 1:
            postgres.stop()
            threading.Timer(0.7, postgres.start).start()
        return toy.objective(run, report)

    work(study, table10, 6, objective=objective)
    assert states(study) == ["complete"] * 6


def test_a_study_of_another_sweep_is_refused_and_stays_readable(url, study, table10, small):
    work(study, table10, 4, objective=toy.objective)
    here = re.escape(fp4graph.__version__)

    def rewrite(**changed):
        """Change the study's manifest, as another version would have written it."""
        where = "study_user_attributes where key = 'fp4graph'"
        with contextlib.closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as database, database:
            (text,) = database.execute(f"select value_json from {where}").fetchone()
            new = json.dumps({**json.loads(text), **changed})
            database.execute("update study_user_attributes set value_json = ? where key = 'fp4graph'", (new,))

    for space, run, manifest, says in (
        (small, RUN, {}, r"study 's' in sqlite.* was made with another search space \('design-space', and"),
        (table10, dataclasses.replace(RUN, lr=0.5), {}, r"lr unset, and now it is 0.5.*--study"),
        (table10, Run("gaussian", steps=2), {}, "the task 'digits', and now it is 'gaussian'; with"),
        (table10, RUN, {"fp4graph": "0.0.1"}, rf"version 0\.0\.1 of fp4graph \(form 2\), and this is {here}"),
    ):
        rewrite(**manifest)
        with pytest.raises(Error, match=says):
            make(url, space, run=run)
        assert len(Study.open(url, "s").results().trials) == 4
    rewrite(format=99)
    with pytest.raises(Error, match=r"in a form that this version.*does not know; update fp4graph"):
        Study.open(url, "s")


def test_a_database_of_something_else_is_left_alone(folder, url, table10):
    path = folder / "sweep.db"
    path.write_text("not a database" * 100)
    with pytest.raises(Error, match=r"sweep\.db has not been usable .*: file is not a database; check that"):
        read([str(folder)], None)
    path.unlink()
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute("create table customers (name text)")
    before = path.read_bytes()
    for look in (lambda: read([str(path)], None), lambda: Study.open(url, "s")):
        with pytest.raises(Error, match=r"sweep\.db holds no sweep"):
            look()
    assert path.read_bytes() == before
    mine = optuna.create_study(storage=url, study_name="s")
    with pytest.raises(Error, match=r"holds no sweep; give the folder or database"):
        read([url], None)
    mine.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=1)
    with pytest.raises(Error, match=r"study 's' in sqlite.* is not a sweep"):
        make(url, table10)
    with pytest.raises(Error, match="has no study 'z'; it has s"):
        Study.open(url, "z")


def test_a_database_is_in_its_folder_and_reading_makes_none(folder, table10):
    for name in ("a?b", "a?c", "50%20", "h#x", "plain"):
        (folder / name).mkdir()
        make(database.url_of(folder / name), table10, name=name)
        assert [results.name for results in read([str(folder / name)], None)] == [name]
    assert sorted(path.name for path in folder.iterdir()) == ["50%20", "a?b", "a?c", "h#x", "plain"]
    (results,) = read([f"sqlite:///file:{folder / 'plain' / 'sweep.db'}?mode=ro&uri=true"], None)
    assert results.name == "plain"
    for url in (f"sqlite:///{folder / 'absent.db'}", f"sqlite:///file:{folder / 'absent.db'}?uri=true"):
        with pytest.raises(Error, match="does not exist"):
            read([url], None)
    assert not (folder / "absent.db").exists()


def test_a_path_for_which_sqlalchemy_has_no_url_is_an_error(monkeypatch, tmp_path):
    """Before 2.1 it escaped nothing, so what follows a question mark was a query."""
    monkeypatch.setattr(URL, "render_as_string", lambda url, **_: f"sqlite:///{url.database}")
    assert database.url_of(tmp_path / "a") == f"sqlite:///{tmp_path / 'a'}"
    with pytest.raises(Error, match=r"SQLAlchemy before 2\.1 takes no"):
        database.url_of(tmp_path / "a?b")


def test_the_policy_of_a_trial_that_failed_with_lines_of_text_is_a_policy(study, table10, folder):
    def shapes(run, report):
        if fp4graph.load_policy(run.policy).quantizes:
            raise RuntimeError("shapes differ:\n  [2, 3]\n  [4, 5]")
        return toy.objective(run, report)

    work(study, table10, 3, objective=shapes)
    assert states(study)[2] == "failed"
    path = export(study, 2, folder)
    assert fp4graph.load_policy(path).quantizes
    assert path.read_text().splitlines()[1].endswith("failed: RuntimeError: shapes differ: [2, 3] [4, 5]")


NOT_USABLE = r"has not been usable for .* the same command resumes"


def test_a_database_that_is_away_is_no_failure_of_a_configuration(url, study, table10):
    def away(run, report):
        with database_away(study, url):
            return toy.objective(run, report)

    work(study, table10, 2, objective=toy.objective)
    with database_away(study, url), pytest.raises(Error, match=NOT_USABLE):
        work(study, table10, 4, objective=toy.objective)
    work(make(url, table10), table10, 4, objective=toy.objective)
    with pytest.raises(Error, match=NOT_USABLE):
        work(study, table10, 6, objective=away)
    assert states(study) == ["complete"] * 4 + ["running"]  # until its worker has been silent for too long


@pytest.mark.process
def test_the_end_of_a_sweep_does_not_wait_for_a_database_that_is_away(url, study, tmp_path, monkeypatch):
    monkeypatch.setattr(workers_module, "HURRIED", 0.5)
    with one_worker(url, tmp_path, study, toy.objective):
        study.storage.engine.dispose()
        Path(url.removeprefix("sqlite:///")).write_bytes(b"no database any more" * 100)
        started = time.monotonic()
    assert time.monotonic() - started < database.ASK_AGAIN  # for which it would otherwise wait
