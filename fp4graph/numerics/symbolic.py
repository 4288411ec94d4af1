"""Facts about symbolic sizes. This module is apart, so that a command can defer the import of torch's module."""

from torch.fx.experimental.symbolic_shapes import statically_known_true as statically_known_true
