"""Shared fixtures: small real models, and a clean compiler between tests."""

from __future__ import annotations

import getpass
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator

import pytest
import timm
import torch
from torch import nn

# Inductor's cache does not tell ATEN_CPU_CAPABILITY apart: it would compile code that was generated for other vectors.
if capability := os.environ.get("ATEN_CPU_CAPABILITY"):
    own = f"torchinductor_{getpass.getuser()}_{capability}"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(tempfile.gettempdir(), own)  # torch has set it when imported


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what is marked ``compiler``, or asks for the fixture ``inductor``, where there is no C++ compiler."""
    if item.get_closest_marker("compiler") or "inductor" in getattr(item, "fixturenames", ()):
        name = os.environ.get("CXX", "g++")
        if shutil.which(name) is None:
            pytest.skip(f"needs a C++ compiler, and there is no {name}: install g++, or name a compiler in CXX")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """No test sees another's compiled code, or its random state."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture
def vit() -> Callable[..., nn.Module]:
    """Makes a two-block timm ViT of width 64 on 32x32 images, the same weights every time."""

    def make(**options: object) -> nn.Module:
        torch.manual_seed(0)
        settings = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 64, "num_heads": 2, "num_classes": 10}
        return timm.create_model("vit_tiny_patch16_224", **{**settings, **options})

    return make


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
