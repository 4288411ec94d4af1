"""What differs between two policies, as text for a message."""

from __future__ import annotations

import difflib

_SHOWN = 12  # lines


def name_in(text: str) -> str:
    """The name in a policy's YAML as ``Policy.to_yaml`` writes it, where it is the second line."""
    return next((line[6:] for line in text.splitlines() if line.startswith("name: ")), "?")


def difference(old: str, new: str) -> str:
    """From one policy's YAML (-) to another's (+), indented, a dozen lines at most; "" where they mean the same."""
    without = "-description:", "+description:", "+++", "---"
    changed = [
        line
        for line in difflib.unified_diff(old.splitlines(), new.splitlines(), n=0, lineterm="")
        if line[:1] in "+-" and not line.startswith(without)
    ]
    if not any(line[1:6] != "name:" for line in changed):
        return ""
    shown = "\n".join(f"  {line}" for line in changed[:_SHOWN])
    return shown + (f"\n  ... and {len(changed) - _SHOWN} lines more" if len(changed) > _SHOWN else "")
