"""The mode and options of torch.compile reach Inductor through apply, merged with those that exactness needs."""

from __future__ import annotations

import copy
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn
from torch._functorch import config as functorch
from torch._inductor import compile_fx
from torch._inductor import config as inductor
from torch._subclasses import FakeTensorMode

import fp4graph
from fp4graph.graph.backend import inner_backend
from fp4graph.kernels.inductor import APART, EXACT, compiler_options, patches
from fp4graph.lab.runs.run import Run
from fp4graph.lab.runs.train import train
from tests.helpers.models import Mlp
from tests.helpers.policies import one_rule

GRAPHS = {"triton.cudagraphs": True}


def patches_of(run):
    """Return the options that Inductor gets in ``run``. Graphs are interpreted instead of compiled."""
    patches = []

    def compile_graph(graph, inputs, config_patches=None, **_):
        patches.append(config_patches)
        return graph.forward

    with mock.patch.object(compile_fx, "compile_fx", compile_graph):
        run()
    return patches


def one_forward(**options):
    return patches_of(lambda: fp4graph.apply(Mlp(8, 16, 8), "microscaling", **options)(torch.ones(4, 8)))


AUTOTUNE = {**GRAPHS, **APART, "max_autotune": True, "coordinate_descent_tuning": True}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, None),
        ({"mode": "default"}, None),
        ({"mode": "reduce-overhead"}, {**GRAPHS, **APART}),
        ({"mode": "max-autotune"}, AUTOTUNE),
        ({"options": {"max_autotune": True, "epilogue-fusion": False}}, {**APART, "max_autotune": True}),
    ],
)
def test_mode_and_options_of_apply_reach_inductor(options, expected):
    assert one_forward(**options) == [expected]


def test_a_compiler_named_in_the_options_goes_before_that_of_the_environment():
    own = {"cpp.cxx": (None, "/opt/own/clang++")}
    with inductor.patch("cpp.cxx", (None, "gcc")):  # as CXX=gcc, which PEFT's BOFT sets
        assert patches(compiler_options("inductor", None, own, None), on_gpu=False) == {**own, **APART}
        assert patches({}, on_gpu=False).keys() == {"cpp.cxx"}


@pytest.mark.parametrize("on_gpu", [False, True])
def test_code_whose_saved_tensors_stay_does_not_come_from_the_cache(on_gpu):
    with functorch.patch(donated_buffer=False):
        assert patches({}, on_gpu=on_gpu)["fx_graph_cache"] is False
    assert "fx_graph_cache" not in patches({}, on_gpu=on_gpu)


def test_on_a_gpu_options_are_merged_with_those_of_exactness():
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(4, 8, device="cuda")
    graph = torch.fx.symbolic_trace(lambda x: x + 1)
    chosen = compiler_options("inductor", "reduce-overhead", None, None)
    names = set()
    for expected, options in ((GRAPHS, chosen), ({}, {})):
        (patches,) = patches_of(partial(inner_backend("inductor", options), graph, [x]))
        names.add(patches.pop("post_grad_custom_post_pass").uuid())
        assert patches == {**expected, **EXACT, **APART}
    assert len(names) == 1, "the pass has two names in Inductor's cache"
    assert None not in names
    with inductor.patch(post_grad_custom_post_pass=lambda graph: None):  # a user's pass stays
        assert patches_of(partial(inner_backend("inductor"), graph, [x])) == [{**EXACT, **APART}]


def test_the_backend_fp4graph_takes_mode_and_options_beside_the_policy():
    def run(**options):
        model = torch.compile(nn.Linear(8, 8), backend="fp4graph", options={"policy": "microscaling", **options})
        model(torch.ones(4, 8))

    assert patches_of(lambda: run(mode="reduce-overhead")) == [{**GRAPHS, **APART}]
    torch._dynamo.reset()
    assert patches_of(lambda: run(**GRAPHS)) == [{**GRAPHS, **APART}]


@pytest.mark.parametrize("name", [*EXACT, *APART])
def test_the_options_of_exactness_exist_and_cannot_be_set_otherwise(name):
    value = {**EXACT, **APART}[name]
    assert torch._inductor.config.get_config_copy()[name] in (True, False)
    assert compiler_options("inductor", None, {name: value}, None) == {name: value}
    with pytest.raises(fp4graph.Error, match=rf"{name}.*would break exactness.*fp4graph needs {name}={value}"):
        compiler_options("inductor", None, {name: not value}, None)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"options": {"use_fast_math": True}}, "use_fast_math.*approximate.*Drop the option"),
        ({"options": {"cpp.enable-unsafe-math-opt-flag": True}}, "unsafe_math.*break exactness"),
        ({"options": {"cpp.enable_floating_point_contract_flag": "fast"}}, "contracted.*'off'"),
        ({"options": {"triton.codegen_upcast_to_fp32": False}}, "16 bits"),
        ({"options": {"freezing": True}}, "frozen weights"),
        ({"options": {"max_autotuned": True}}, "no option 'max_autotuned'; did you mean 'max_autotune'"),
        ({"options": {"zzz": True}}, r"no option 'zzz'; torch\._inductor\.list_options\(\)"),
        ({"options": {"max_autotune": "yes"}}, "Unexpected type of attr max_autotune"),
        ({"mode": "max-autotun"}, "no mode 'max-autotun'; did you mean 'max-autotune'"),
        ({"mode": "max-autotune", "options": GRAPHS}, "mode or options, not both; drop mode='max-autotune'"),
        ({"mode": "max-autotune", "backend": "eager"}, "mode= is for Inductor.*'eager'.*backend='inductor'"),
        ({"options": GRAPHS, "backend": "aot_eager"}, "options= is for Inductor"),
    ],
)
def test_invalid_options_are_refused_by_name_and_the_model_is_unchanged(options, words):
    model = nn.Linear(8, 8)
    before = dict(model.__dict__)
    with pytest.raises(fp4graph.Error, match=words):
        fp4graph.apply(model, "microscaling", **options)
    assert model.__dict__ == before


@pytest.mark.slow
def test_a_run_has_a_mode():
    with pytest.raises(fp4graph.Error, match="no mode 'quick'"):
        train(Run("gaussian", steps=1, backend="inductor", mode="quick"))


@pytest.mark.slow
def test_options_stay_after_a_phase_and_in_a_copy():
    policy = one_rule(phases=[{"at": 1, "operands": {"gradients": "keep"}}])

    def run():
        model = fp4graph.apply(Mlp(8, 16, 8), policy, mode="reduce-overhead")
        for _ in range(2):
            model(torch.ones(4, 8))
        copy.deepcopy(model)(torch.ones(4, 8))

    given = patches_of(run)
    assert len(given) >= 3
    assert all(patches == {**GRAPHS, **APART} for patches in given)


@pytest.mark.slow
def test_for_cuda_graphs_keys_are_static_inputs_and_the_step_is_not():
    """A CUDA graph replays kernels on fixed addresses. It reads static inputs where they lie, and copies others into
    its memory; a static input at a new address makes it record again. Parameters, keys and state stay where they are.
    Each forward has its own step tensor, because a backward may come after the next forward."""
    static, forwards = [], []

    def compile_inner(graph, examples, *, static_input_idxs=(), is_backward=False, **_):
        if not is_backward:
            static.extend(index in static_input_idxs for index in range(len(examples)))

        def run(arguments):
            if not is_backward:
                forwards.append(list(arguments))
            return graph(*arguments)

        run._boxed_call = True
        return run

    x = torch.randn(40, 64)
    with mock.patch.object(compile_fx, "compile_fx_inner", compile_inner):
        model = fp4graph.apply(Mlp(64, 96, 64), "tetrajet-qema", mode="reduce-overhead")
        fp4graph.prepare_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
        outputs = [model(x) for _ in range(3)]
        for y in outputs:
            y.sum().backward()
    owned = {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    is_owned = [tensor.data_ptr() in owned for tensor in forwards[0]]
    assert sum(is_owned) == len(list(model.parameters())) + 2 * len(["key", "EMA of the weight"])
    assert static == is_owned
    places = [[a.data_ptr() for a, fixed in zip(inputs, static, strict=True) if fixed] for inputs in forwards]
    assert places == places[:1] * 3
    steps = [[a for a in inputs if a.shape == (5,) and a.dtype is torch.int32] for inputs in forwards]
    assert [[int(step[4]) for step in each] for each in steps] == [[0], [1], [2]]
    assert sum(not fixed for fixed in static) == len(["x", "step"])


@pytest.mark.parametrize(
    ("setting", "value", "says"),
    [
        ("use_fast_math", True, "approximate instructions"),
        ("freezing", True, "frozen weights"),
        ("cpp.enable_floating_point_contract_flag", "fast", "rounds once"),
    ],
)
def test_inductors_settings_that_break_exactness_are_refused(setting, value, says):
    """Environment variables change them, such as TORCHINDUCTOR_USE_FAST_MATH=1."""
    message = rf"_inductor\.config\.{setting} is {value!r}.*{says}.*environment variable"
    with torch._inductor.config.patch({setting: value}), pytest.raises(fp4graph.Error, match=message):
        one_forward()


def test_gemms_stay_apart_if_the_environment_turns_tuning_on():
    with torch._inductor.config.patch(max_autotune_gemm=True):
        assert one_forward() == [APART]
