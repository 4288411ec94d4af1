"""Options of Inductor: the options with which its code gives the bits of eager mode, merged with the user's options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import Graph

from fp4graph.errors import Error, nearest, suggest
from fp4graph.kernels import build, reading

#: Options of ``torch.compile`` (``config_patches`` of ``compile_fx``) under which quantizers are bit-exact on CUDA.
#:
#: ``eager_numerics.division_rounding``: by default Triton divides by ``div.full.f32``, which is up to two ulps off, so
#: that a ratio or a scale near a tie may round the other way. With the option it uses ``div.rn.f32``, as eager mode.
#:
#: ``eager_numerics.disable_ftz``: by default the functions of libdevice, here floor and ceil, flush subnormals to zero
#: (``cvt.rpi.ftz``), so that an element far below its block's scale is never rounded stochastically away from zero.
#:
#: ``emulate_precision_casts``: by default Inductor drops a cast to bf16 or fp16 that a cast back to fp32 follows in one
#: kernel, so that double quantization starts from other values than the GEMM's. It also contracts products with sums
#: (``fma.rn.f32``), which rounds once where eager mode rounds twice. The option prevents both.
EXACT: dict[str, bool] = {
    "eager_numerics.division_rounding": True,
    "eager_numerics.disable_ftz": True,
    "emulate_precision_casts": True,
}

#: Options that prevent the fusion of GEMMs with their neighbours where ``max_autotune`` has Inductor write the GEMMs. A
#: fused epilogue reads the fp32 accumulator, so the next quantizer would see values not rounded to the GEMM's dtype.
APART: dict[str, bool] = {"epilogue_fusion": False, "prologue_fusion": False}

#: Further options: the value without which they break exactness, and the reason.
_REQUIRED: dict[str, tuple[object, str]] = {
    "use_fast_math": (False, "approximate instructions change what quantizers round"),
    "cpp.enable_unsafe_math_opt_flag": (False, "reordered arithmetic changes what quantizers round"),
    "cpp.enable_floating_point_contract_flag": ("off", "a contracted multiply-add rounds once, eager mode twice"),
    "cuda.use_fast_math": (False, "approximate instructions change what quantizers round"),
    "cutlass.use_fast_math": (False, "approximate instructions change what quantizers round"),
    "triton.native_matmul": (False, "it fuses products with quantizers, which then see sums that were never rounded"),
    "b2b_gemm_pass": (False, "a quantizer between two products would be fused with both"),
    "cuda_backend": ("triton", "the options that make GPU code exact are those of Triton"),
    "cpu_backend": ("cpp", "CPU code is known to be exact only in C++"),
    "triton.codegen_upcast_to_fp32": (True, "arithmetic in 16 bits rounds where eager mode does not"),
    "freezing": (False, "frozen weights do not change, so an evaluation between steps would use old weights"),
}  # fmt: skip
_REASONS = {
    **dict.fromkeys(EXACT, "without it the code for a GPU does not give the bits of eager mode"),
    **dict.fromkeys(APART, "a quantizer fused with a GEMM would see an accumulator that was never rounded"),
}


def compiler_options(
    backend: str, mode: str | None, options: Mapping[str, Any] | None, dynamic: bool | None
) -> dict[str, Any]:
    """Return the Inductor options for ``torch.compile``'s ``mode`` and ``options``, without those that exactness adds.

    Raises:
        Error: the backend is not Inductor, mode and options are both given, torch does not know the mode or an option,
            or an option would break exactness. The message names the cause and the remedy.
    """
    if mode is None and not options:
        return {}
    if backend != "inductor":
        what = " and ".join(name for name, value in (("mode", mode), ("options", options)) if value)
        raise Error(f"{what}= is for Inductor, not backend={backend!r}; drop {what}=, or use backend='inductor'")
    if mode is not None and options:
        raise Error(
            f"torch.compile takes mode or options, not both; drop mode={mode!r} and add its options to yours "
            f"(torch._inductor.list_mode_options({mode!r}))"
        )
    normalized = {name.replace("-", "_"): value for name, value in (options or {}).items()}
    for name, value in normalized.items():
        _check(name, value)
    if mode is not None:
        known = torch._inductor.list_mode_options()
        if mode not in known:
            raise Error(f"torch.compile has no mode {mode!r}; {suggest(mode, known)}")
    try:
        chosen: dict[str, Any] = torch._TorchCompileInductorWrapper(mode, normalized or None, dynamic).config
    except RuntimeError as error:
        raise Error(_refusal(str(error), normalized)) from None
    for name, value in chosen.items():
        _check(name, value)
    return dict(chosen)


def require_compiler() -> None:
    """Raise an Error if Inductor finds no C++ compiler, which its code for a CPU needs."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except (InvalidCxxCompiler, OSError) as error:
        raise _uncompilable(str(error)) from error


@contextmanager
def compiler_errors() -> Iterator[None]:
    """Raise an :class:`Error` if Inductor's C++ compiler fails in this context, or does not link the C++ library."""
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not (
            isinstance(cause, CppCompileError | InvalidCxxCompiler)
            or (isinstance(cause, ImportError) and "undefined symbol" in str(cause))
        ):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        lines = str(cause).splitlines()
        raise _uncompilable(next((line.strip() for line in lines if "error:" in line), lines[0])) from error


def _uncompilable(cause: str) -> Error:
    return Error(
        f"on a CPU backend='inductor' needs a C++ compiler, and none works here ({cause}). Install one (Debian and "
        "Ubuntu: g++ and python3-dev; or the package gxx of conda-forge), name one in the environment variable CXX, or "
        "use backend='eager', which needs no compiler, is slower, and quantizes to the same values"
    )


def patches(chosen: Mapping[str, Any], *, on_gpu: bool) -> dict[str, Any]:
    """Return ``chosen`` merged with the options that exactness needs.

    Code for a CPU needs such an option only if Inductor also writes the GEMMs.

    Raises:
        Error: torch's own settings, which the environment or the program may have changed, break exactness.
    """
    from torch._functorch.config import donated_buffer
    from torch._inductor import config

    for name, (required, reason) in _REQUIRED.items():
        value = chosen.get(name, _setting(config, name, required))
        if value != required:
            raise Error(
                f"torch._inductor.config.{name} is {value!r}, which would break exactness: {reason}. Set it to "
                f"{required!r} before the model is first called, or drop the environment variable that set it"
            )
    # Inductor's cache does not tell apart code that writes into donated buffers, which a second backward would read.
    uncached = {} if donated_buffer else {"fx_graph_cache": False}
    if on_gpu:
        passes = {} if config.post_grad_custom_post_pass else {"post_grad_custom_post_pass": _reading_in_place()}
        return {**passes, **chosen, **uncached, **EXACT, **APART}
    tunes = bool(chosen) or config.max_autotune or config.max_autotune_gemm
    return {**_compiler(), **chosen, **uncached, **(APART if tunes else {})}


def _reading_in_place() -> Any:
    """Return :func:`fp4graph.kernels.reading.read_in_place` as an Inductor pass with a version for the cache."""
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class Pass(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            reading.read_in_place(graph)

        def uuid(self) -> Any:
            return get_hash_for_files((reading.__file__,))

    return Pass()


def _compiler() -> dict[str, Any]:
    """Return the setting that names a C++ compiler to Inductor where CXX names a C compiler; else nothing."""
    command = build.inductor_command()
    linking = command and build.cxx_command(command)
    return {} if linking == command else {"cpp.cxx": (None, linking)}


def _setting(config: Any, name: str, otherwise: object) -> object:
    """Return the value of a setting of torch, or ``otherwise`` if this version of torch lacks the setting."""
    for part in name.split("."):
        config = getattr(config, part, None)
        if config is None:
            return otherwise
    return config


def _check(name: str, value: object) -> None:
    """Raise an Error if option ``name`` with this ``value`` would break exactness."""
    fixed = {**EXACT, **APART}
    required, reason = (fixed[name], _REASONS[name]) if name in fixed else _REQUIRED.get(name, (value, ""))
    if value != required:
        raise Error(
            f"options={{{name!r}: {value!r}}} would break exactness: {reason}. Drop the option; fp4graph needs "
            f"{name}={required!r}"
        )


def _refusal(message: str, options: Mapping[str, Any]) -> str:
    """Return torch's error message about an option, shortened: torch lists every option that it knows."""
    from torch._inductor import config

    known = config.get_config_copy()
    for name in options:
        if name not in known:
            near = nearest(name, known)
            remedy = f"did you mean {near[0]!r}?" if near else "torch._inductor.list_options() lists them"
            return f"Inductor has no option {name!r}; {remedy}"
    return message
