"""Every error that fp4graph raises on purpose, so that one ``except fp4graph.Error`` catches them all."""

from __future__ import annotations


class Error(Exception):
    """Base of every error of fp4graph's own."""


class PolicyError(Error):
    """A policy that cannot be loaded or cannot be honoured by the model it is applied to.

    Args:
        message: what is wrong, and what to do about it.
        file: the policy file, or None for a policy given as data.
        line: 1-based line in that file, or None.
    """

    def __init__(self, message: str, *, file: str | None = None, line: int | None = None) -> None:
        self.message = message
        self.file = file
        self.line = line
        place = ":".join(str(part) for part in (file, line) if part is not None)
        super().__init__(f"{place}: {message}" if place else message)


class SpecError(Error, TypeError, ValueError):
    """A field of a quantizer's spec has the wrong type or an impossible value; the message names the field.

    It is a TypeError and a ValueError as well, as such arguments raise elsewhere.
    """


class PolicyWarning(UserWarning):
    """Warns about a policy that is valid but probably not what its author meant."""


class PluginError(Error):
    """A plugin that cannot be loaded or that broke its contract.

    Args:
        message: what went wrong.
        plugin: its name, or None where it is not known.
        site: the place in the model where it happened; whoever knows it may fill it in while the error passes.
    """

    def __init__(self, message: str, *, plugin: str | None = None, site: str | None = None) -> None:
        self.message = message
        self.plugin = plugin
        self.site = site
        super().__init__(message)

    def __str__(self) -> str:
        # Not from args: torch.fx appends the whole graph to them when an error passes.
        where = [f"plugin {self.plugin!r}"] if self.plugin else []
        where += [f"at {self.site}"] if self.site else []
        return f"{', '.join(where)}: {self.message}" if where else self.message


class NonFiniteError(Error):
    """NaN or Inf, found by ``fp4graph.detect_nonfinite``; ``site`` names the place where it arose."""

    def __init__(self, message: str, *, site: str) -> None:
        self.message = message
        self.site = site
        super().__init__(f"{site}: {message}")


class CaptureError(Error):
    """A captured graph that the policy cannot be applied to; ``site`` names the place in the model."""

    def __init__(self, message: str, *, site: str | None = None) -> None:
        self.message = message
        self.site = site
        super().__init__(f"{site}: {message}" if site else message)


class UncompiledError(CaptureError):
    """A module with quantized sites was about to run outside its compiled graph, in silent high precision."""
