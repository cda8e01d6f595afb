"""Grain's worker processes and absl's flags."""

from __future__ import annotations


def mark_flags_parsed() -> None:
    """Lets Grain start worker processes from a script that parsed no absl flags: https://github.com/google/grain/issues/1355."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
