"""Rewrites the words a user types into words that Hydra takes: `+backend=cpu`, `plugins`, `prompt='What?'`.

Knows the vocabulary (groups, options, keys) from the YAML files alone and imports no Hydra. Keys inside a node are not
checked here: the composer does that, with the dataclass of the node.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from framework.discovery import config_files, group_options
from framework.errors import ConfigError, as_typed, did_you_mean, no_such_choice
from framework.promised import refuse_key, refuse_option

RUN_TEXTS = ("prompt", "system", "prompts_file", "output", "target")
"""Texts that belong to the command line alone."""
TEXT_KEYS = (*RUN_TEXTS, "trace")
"""Keys whose value is text: never parsed, never swept, delivered byte for byte."""
NOT_A_LIST_OF_OPTIONS = re.compile(r"[\[\](){}$]")
REMOVED_STAGE = re.compile(r"sampler\.stages\.[^.]+")
Roots = Sequence[tuple[str, Path]]


@dataclass(frozen=True)
class Vocabulary:
    """Words that mean something: options of each group, groups that hold one choice, and top-level keys."""

    options: Mapping[str, Mapping[str, tuple[str, Path]]]
    single: frozenset[str]
    keys: frozenset[str]

    @classmethod
    def read(cls, roots: Roots, primary: str = "config") -> Vocabulary:
        """The vocabulary of a primary config and whatever configs it includes. ConfigError if there is no such file."""
        files: dict[str, Path] = {}
        for _, root in roots:
            for key, path in config_files(root).items():
                files.setdefault(key, path)
        if primary not in files:
            known = [key for key in files if "/" not in key]
            raise ConfigError(f"--config-name={primary}: there is no {primary}.yaml.{did_you_mean(primary, known)}")
        single, keys = _primary(primary, files, set())
        return cls(group_options(roots), frozenset(single), frozenset(keys | single) - {"hydra", "defaults"})


def command_words(typed: Iterable[str], vocabulary: Vocabulary) -> list[str]:
    """Hydra words for the words of a command line, flags excluded. The first bare word is a run, the second its target.

    ConfigError for a word that means nothing, with the nearest that does; NotBuiltError for a promised one.
    """
    named = _named(typed)
    for key in ("run", *TEXT_KEYS):
        given = [word for word in named if word.lstrip("+").startswith(f"{key}=")]
        if len(given) > 1:
            raise ConfigError(
                f"{' and '.join(map(as_typed, given))}: only one {key} can be given. Leave the others out"
            )
    return _merged_groups([_rewritten(word, vocabulary) for word in named], vocabulary)


def override_words(typed: Iterable[str], vocabulary: Vocabulary) -> list[str]:
    """Hydra words for `LLM(overrides=...)`: as `command_words`, without what belongs to the command line alone."""
    words = list(typed)
    for word in words:
        if not isinstance(word, str):
            raise ConfigError(f"override {word!r} is not a string. Write it as on the command line: 'backend=cpu'")
        key, equals, _ = word.lstrip("+").partition("=")
        if word.startswith("-") or not (equals or word.startswith("~")):
            raise ConfigError(f"override {word!r} is not KEY=VALUE. Flags and bare words belong to the command line")
        if key in RUN_TEXTS or re.match(r"(run|bench|server|sweep|hydra)\b", key):
            refuse_key(key)
            raise ConfigError(f"override {word!r}: {key} belongs to the command line alone. Leave it out")
    return command_words(words, vocabulary)


def quoted(text: str) -> str:
    """A Hydra value that arrives as `text`, byte for byte: quotes for Hydra's grammar, escapes for OmegaConf's."""
    # OmegaConf reads a backslash as an escape only in a run of them that ends at ${: double the run, then add one.
    literal = re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", text)
    # Hydra reads a backslash as an escape only in a run of them that ends at a quote, the closing one included.
    escaped = re.sub(r"(\\*)('|\Z)", lambda match: match[1] * 2 + (r"\'" if match[2] else ""), literal)
    return f"'{escaped}'"


def _named(typed: Iterable[str]) -> list[str]:
    """The words with their keys: bare words become `run=` and `target=`."""
    words, bare = [], ["run", "target"]
    for word in typed:
        if word.strip("~+") == "":
            raise ConfigError(f"'{word}': a key is missing. Write ~KEY to remove one, or KEY=VALUE")
        if "=" in word or word.startswith("~"):
            words.append(word)
        elif word.startswith("+"):
            raise ConfigError(f"{word}: a value is missing. Write {word}=VALUE")
        elif bare:
            words.append(f"{bare.pop(0)}={word}")
        else:
            raise ConfigError(f"{word}: only a run and its target may stand without a key. Write KEY=VALUE")
    return words


def _refuse_no_choice(word: str, vocabulary: Vocabulary) -> None:
    group = word.lstrip("~").partition("=")[0]
    if group in vocabulary.single:
        names = ", ".join(sorted(vocabulary.options.get(group, ())))
        raise ConfigError(f"{word}: one must be chosen. Write {group}=NAME ({names}), or leave the word out")


def _rewritten(word: str, vocabulary: Vocabulary) -> str:
    if word.startswith("~"):
        _refuse_no_choice(word, vocabulary)
        return word
    signed, _, value = word.partition("=")
    key = signed.lstrip("+")
    group, top = key.partition("@")[0], re.split(r"[./@\[]", key, maxsplit=1)[0]
    if key == "hydra":
        raise ConfigError(f"{word}: hydra has many keys. Write hydra.KEY=VALUE")
    if top == "hydra":
        return word
    refuse_key(key)
    if key in TEXT_KEYS:
        return f"++{key}={quoted(value)}"
    if group in vocabulary.options:
        _check_options(group, value, vocabulary)
        return f"{key}={value}" if group in vocabulary.single else f"+{key}={value}"
    if value == "null" and REMOVED_STAGE.fullmatch(key):
        return f"~{key}"  # the deletion, unlike a null, is refused where there is no such stage
    if "/" in group or top not in vocabulary.keys:
        raise _unknown(group if "/" in group else top, word, vocabulary)
    return (
        f"++{key}={value}"  # added or replaced: whether the key exists is for the composer to say, with its neighbours
    )


def _check_options(group: str, value: str, vocabulary: Vocabulary) -> None:
    known = vocabulary.options[group]
    if group in vocabulary.single and value.startswith("["):
        raise ConfigError(f"{group}={value}: {group} takes one choice, not a list. Choices: {', '.join(known)}")
    names = value[1:-1] if value.startswith("[") and value.endswith("]") else value
    if NOT_A_LIST_OF_OPTIONS.search(names):
        return  # a sweep function or an interpolation: Hydra's business
    for option in names.split(","):
        option = option.strip()
        if option not in known:
            refuse_option(group, option, known)
            raise no_such_choice(group, option, known)


def _unknown(name: str, word: str, vocabulary: Vocabulary) -> ConfigError:
    known = sorted({*vocabulary.options, *vocabulary.keys})
    return ConfigError(
        f"{word}: there is no key or group '{name}'.{did_you_mean(name, known)} Known: {', '.join(known)}"
    )


def _merged_groups(words: list[str], vocabulary: Vocabulary) -> list[str]:
    """`+sampler/stage=a +sampler/stage=b` as one `+sampler/stage=[a,b]`, since Hydra takes a group only once."""
    merged: dict[str, list[str]] = {}
    others = []
    for word in words:
        key, _, value = word.partition("=")
        one_choice = re.fullmatch(r"\[[^\[\](){}$]*\]|[^,\[\](){}$]*", value) is not None
        if one_choice and key.startswith("+") and key[1:] in vocabulary.options:
            merged.setdefault(key, []).append(value)
        else:
            others.append(word)
    return others + [f"{key}={_joined(values)}" for key, values in merged.items()]


def _joined(values: list[str]) -> str:
    return values[0] if len(values) == 1 else f"[{','.join(value.strip('[]') for value in values)}]"


def _primary(name: str, files: Mapping[str, Path], seen: set[str]) -> tuple[set[str], set[str]]:
    """(groups with one choice, top-level keys) of a config file and of those its defaults list includes."""
    if name in seen or name not in files:
        return set(), set()
    seen.add(name)
    loaded: Any = yaml.load(files[name].read_text(encoding="utf-8"), Loader=_Loader) or {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"{files[name].name} must hold a mapping of keys")
    groups, keys = set(), set(loaded)
    for entry in loaded.get("defaults") or ():
        if isinstance(entry, str):
            more_groups, more_keys = _primary(entry.strip("/"), files, seen)
            groups |= more_groups
            keys |= more_keys
        elif isinstance(entry, dict):
            groups |= {_bare_group(group) for group, choice in entry.items() if not isinstance(choice, list)}
    return {group for group in groups if not group.startswith("hydra/")}, keys


def _bare_group(entry: str) -> str:
    """`override /sampler@x` and the like without their marks."""
    return str(entry).split()[-1].strip("/").partition("@")[0]


_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
