"""The text of `--help`: groups, choices with the first comment of each file, keys. Imports neither Hydra nor torch.

Read from the YAML files of every installed plugin; a choice of a third party bears its distribution in brackets.
"""

from __future__ import annotations

from pathlib import Path

from framework.discovery import OURS
from framework.words import Roots, Vocabulary

USAGE = """\
usage: python -m framework [RUN [TARGET]] [GROUP=CHOICE ...] [KEY=VALUE ...] [flags]

  python -m framework                                   generate from the default prompts with the default model
  python -m framework +sampler=greedy prompt='Hello'    a leading + or ++ is allowed and changes nothing
  python -m framework chat                              talk with the model
  python -m framework explain engine.seed=3             who set which value, what is chosen by itself and why
  python -m framework bench bench.num_prompts=32        measure throughput; bench=latency and bench=startup as well
  python -m framework plugins                           what is installed, what is broken, what this machine has
"""
WITH_OPTIONS = ("run", "bench")
"""Groups whose choices have keys of their own that a user types."""
FLAGS = """\
flags:
  --help, -h                 this page
  --version                  the version
  --cfg job, -c job          print the composed config
  --multirun, -m             run every combination of comma-separated values
  --config-dir DIR           a folder of your own YAML
  --config-name NAME         another primary config
  --hydra-help               everything that Hydra offers
  -sc install=bash           completion, through the script `framework`: eval "$(framework -sc install=bash)"
An error is one line and exit code 2; HYDRA_FULL_ERROR=1 shows its trace. FRAMEWORK_PLUGINS=-NAME leaves a plugin out.
"""


def help_text(roots: Roots, vocabulary: Vocabulary) -> str:
    """The whole page."""
    parts = [USAGE]
    for group in sorted(vocabulary.options):
        parts.append(_group(group, vocabulary))
    parts.append(_keys(roots[0][1] / "config.yaml"))
    parts.append(FLAGS)
    return "\n".join(parts)


def _group(group: str, vocabulary: Vocabulary) -> str:
    lines = [f"{group}={'CHOICE' if group in vocabulary.single else '[CHOICE,...]'}"]
    for option, (dist, path) in sorted(vocabulary.options[group].items()):
        origin = "" if dist == OURS else f" [{dist}]"
        lines.append(f"  {option:<14} {first_comment(path)}{origin}".rstrip())
        if group in WITH_OPTIONS:
            lines += [f"      {group}.{line}" for line in _own_keys(path)]
    return "\n".join(lines) + "\n"


def _own_keys(path: Path) -> list[str]:
    """Keys of a choice's file with their defaults, its name left out."""
    keys = [line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith(("#", " "))]
    return [line for line in keys if not line.startswith(("name:", "defaults:"))]


def first_comment(path: Path) -> str:
    """The first comment line of a YAML file, `@package` directives passed over; empty when there is none."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            return ""
        if not line.startswith("# @"):
            return line.lstrip("# ")
    return ""


def _keys(path: Path) -> str:
    """Keys of the primary config as they stand there, without its groups and Hydra's part."""
    lines, shown = ["keys and their defaults"], False
    for line in path.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith((" ", "#")):
            shown = not line.startswith(("defaults:", "hydra:"))
        if shown and line.strip():
            lines.append(f"  {line}")
    return "\n".join(lines) + "\n"
