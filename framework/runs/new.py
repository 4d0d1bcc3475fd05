"""`run=new`: writes the package of a component that passes its tests and `run=check` as it stands.

`new stage/NAME` writes the folder NAME here, or another one with `run.folder`; nothing that is there is overwritten.
The texts are in `new_skeletons`.
"""

from __future__ import annotations

import importlib.util
import keyword
import re
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from framework.config import build_options
from framework.errors import ConfigError, did_you_mean
from framework.plugins import KINDS, registry
from framework.runs.new_skeletons import SELECT, SKELETONS
from framework.runs.options import NewOptions
from framework.runs.unread import OF_BENCH, refuse_texts, refuse_unread

if TYPE_CHECKING:
    from framework.config import Config
    from framework.runs import RunArgs

_NAME = re.compile(r"[a-z][a-z0-9_]*")


def run(config: Config, args: RunArgs) -> None:
    """Prints what was written and what to do with it. ConfigError for a name that cannot be had."""
    refuse_texts("new", args, dict.fromkeys(("prompt", "system", "prompts_file", "output"), "leave it out"))
    refuse_unread("new", args, OF_BENCH)
    options = build_options(NewOptions, args.options, "run")
    kind, name = named(args.target)
    folder = Path(options.folder or name)
    files = {folder / path: text for path, text in filled(kind, name).items()}
    _write(folder, files)
    print("\n".join(["written:", *(f"  {path}" for path in files), "", *_next(kind, name, folder)]))


def named(target: str | None) -> tuple[str, str]:
    """(kind, name) of a component that may be written. ConfigError says what stands in the way."""
    kinds = ", ".join(SKELETONS)
    kind, _, name = (target or "").rpartition("/")
    if not kind or not name:
        raise ConfigError(f"new needs to know what, as in new stage/my_stage. Kinds: {kinds}")
    kind = {"sampler/stage": "stage"}.get(kind, kind)
    if kind not in SKELETONS:
        known = f"components of kind {kind} have no skeleton" if kind in KINDS else f"there is no kind {kind!r}"
        raise ConfigError(f"target={target}: {known}.{did_you_mean(kind, SKELETONS)} Kinds: {kinds}")
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise ConfigError(f"target={target}: {name!r} is no name of a package. Use small letters, digits and _")
    taken = [spec for spec in registry().specs(kind) if spec.name == name]
    if taken:
        raise ConfigError(f"target={target}: {taken[0].dist} has a component of that name. Choose another")
    if importlib.util.find_spec(name) is not None:
        raise ConfigError(
            f"target={target}: there is a module of the name {name}, which would be hidden. Choose another"
        )
    return kind, name


def filled(kind: str, name: str) -> dict[str, str]:
    """{path: text} of the package."""
    words = {
        "kind": kind,
        "name": name,
        "dist": name.replace("_", "-"),
        "Class": "".join(part.title() for part in name.split("_")),
    }
    skeleton = SKELETONS[kind].items()
    return {Template(path).substitute(words): Template(text).substitute(words) for path, text in skeleton}


def _write(folder: Path, files: dict[Path, str]) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there already, and nothing is overwritten. Say run.folder=ANOTHER")
    try:
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written ({error.strerror}). Say run.folder=ANOTHER") from error


def _next(kind: str, name: str, folder: Path) -> list[str]:
    word = Template(SELECT[kind]).substitute(name=name)
    use = f"python -m framework {word} prompt='A good day begins with'" if word else "python -m framework plugins"
    return [
        "next:",
        f"  pip install -e {folder if folder.is_absolute() else f'./{folder}'}",  # a bare word is an index's to pip
        f"  python -m framework check {kind}/{name}",
        f"  python -m pytest {folder}",
        f"  {use}",
        f"Then change {folder / name / 'component.py'}, and check again.",
    ]
