"""Re-exports torch's test of symbolic sizes, from a module whose import a command can defer."""

from torch.fx.experimental.symbolic_shapes import statically_known_true as statically_known_true
