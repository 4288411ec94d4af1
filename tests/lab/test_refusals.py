"""Commands refuse a mistake with a sentence, and leave no file behind."""

import pytest

SWEEP, TETRAJET = "sweep --task=digits", "--policies=tetrajet"
SERVER, SECRET = (f"postgresql://someone:{password}@127.0.0.1:9/x" for password in ("hunter2", "***"))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("compare digits", "give the policies to compare"),
        (f"compare {TETRAJET}", "give either a task"),
        (f"compare digits --train=a:b {TETRAJET}", "give either a task"),
        (f"compare digitz {TETRAJET}", "unknown task 'digitz'; did you mean"),
        ("compare digits --policies=bf16", "there is no policy to compare with the baseline 'bf16'"),
        ("compare digits --policies=tetrajett", "did you mean the shipped policy 'tetrajet'"),
        ("compare digits --policies=tetrajet,tetrajet", "two of the policies are called 'tetrajet'"),
        (f"compare digits {TETRAJET} --device=abacus", "device 'abacus' cannot be used"),
        (f"compare imagenet100 {TETRAJET}", "task 'imagenet100' needs ImageNet-100"),
        (f"compare --train=absent:fn {TETRAJET}", "module 'absent' is neither in"),
        (f"compare --train=json:fn {TETRAJET}", "has no 'fn'"),
        (f"compare --train=json:load {TETRAJET} --lr=1", "--lr is only for tasks"),
        ("train", "give a task to train"),
        ("train gausian", "did you mean 'gaussian'"),
        ("train digits --optimizer-option=beta", "takes name=value; got 'beta'"),
        ("train digits --resume", "--resume needs the folder of the run"),
        ("train digits --stream=wandbb", "unknown stream 'wandbb'; did you mean 'wandb'"),
        ("sweep --task=digit", "unknown task 'digit'; did you mean 'digits'?"),
        (f"{SWEEP} --rule=tables", "unknown rule 'tables' of the score; known: text, table"),
        (f"{SWEEP} --sampler=grid", "unknown sampler 'grid'; known: random, tpe"),
        (f"{SWEEP} --pruner=mean", "unknown pruner 'mean'; known: none, median, hyperband"),
        (f"{SWEEP} --space=design", "did you mean 'design-space'?"),
        (f"{SWEEP} --steps=3 --epochs=1", "give only one"),
        (f"{SWEEP} --optimizer=adamm", "did you mean 'adam'?"),
        (f"{SWEEP} --device=cudda", "device 'cudda' cannot be used"),
        (f"{SWEEP} --export-policy=3", "does not exist"),
        (f"{SWEEP} --output={__file__}", "refusals.py cannot be written: Not a directory; give another folder with --"),
        ("sweep-results nowhere --picture=x.bmp", "ends in .png or .pdf or .svg"),
        ("sweep-results nowhere --export=x.txt", "ends in .csv or .json"),
        ("sweep-results nowhere --all --choices", "not both"),
        ("sweep-results nowhere --rule=paper", "known: text, table"),
        pytest.param(f"sweep-results {SERVER}", f"{SECRET} has not been usable for", marks=pytest.mark.slow),
        ("sweep-results sqlite:////nowhere/at/all/s.db", "folder '/nowhere/at/all' does not exist"),
        ("sweep-results nothing", "database 'nothing' does not exist"),
        ("sweep-results mongodb://x", "has no driver for this database"),
        ("sweep-results postgresql://host:port/name", "not a database URL"),
    ],
)
def test_a_mistake_is_named_and_leaves_no_file(command, tmp_path, words, says):
    code, _, error = command(*words.split())
    assert code != 0
    assert says in error
    assert "hunter2" not in error
    assert not [*tmp_path.iterdir()]
