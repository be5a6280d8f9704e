"""Read the options of a script from its command line, and from the YAML file that `--config` names.

Words of the command line win over the file. What the file says means what it would mean in Python: null is None, a
mapping is a dict, 1e-5 is a number and no is the word, as in YAML 1.2. Nothing here knows which options a script has.
"""

import argparse
import json
import re
import sys
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import yaml
from transformers import HfArgumentParser

from hf_megapack.config import refuse_trl_names
from hf_megapack.errors import ConfigError

# Tag to what is of its kind, and the characters that it begins with.
_CHANGED = {
    "tag:yaml.org,2002:bool": (r"(true|True|TRUE|false|False|FALSE)\Z", "tTfF"),
    "tag:yaml.org,2002:float": (
        r"[-+]?((\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.(inf|Inf|INF))\Z|\.(nan|NaN|NAN)\Z",
        "-+.0123456789",
    ),
}


class _Loader(yaml.SafeLoader):
    """Takes numbers and booleans as YAML 1.2 does: yaml reads 1.1, in which 1e-5 is text and no is False."""

    yaml_implicit_resolvers: ClassVar = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in _CHANGED]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


for _tag, (_pattern, _first) in _CHANGED.items():
    _Loader.add_implicit_resolver(_tag, re.compile(_pattern), list(_first))


def parse_options(classes: Sequence[type], argv: Sequence[str] | None = None) -> tuple[Any, ...]:
    """Return one filled dataclass for each class.

    Args:
        classes: Dataclasses whose fields are the options, such as MegaPackConfig.
        argv: Words of the command line; None takes the process's own.

    Raises:
        SystemExit: If an option is unknown, missing or wrong, or the file cannot be read; with the reason.
    """
    try:
        return _parse(classes, sys.argv[1:] if argv is None else argv)
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from error


def _parse(classes: Sequence[type], argv: Sequence[str]) -> tuple[Any, ...]:
    config = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    config.add_argument("--config", metavar="FILE", help="YAML file of options; those on the command line win.")
    parser = HfArgumentParser(classes, allow_abbrev=False, parents=[config])
    given, words = config.parse_known_args(argv)
    options = {} if given.config is None else _read_options(given.config)
    refuse_trl_names([*options, *(_option_name(word) for word in words if word.startswith("--"))])
    nulls = {name for name, value in options.items() if value is None}
    types = {name: of for cls in classes for name, of in typing.get_type_hints(cls).items()}
    _check_nulls(nulls, types, given.config)
    _check_lists(options)
    as_they_are = dict.fromkeys(nulls) | {
        name: value for name, value in options.items() if isinstance(value, list) and _is_one_word(types.get(name))
    }
    parser.set_defaults(**as_they_are)
    from_file = [word for name, value in options.items() if name not in as_they_are for word in _words(name, value)]
    *parsed, _, unknown = parser.parse_args_into_dataclasses([*from_file, *words], return_remaining_strings=True)
    if unknown:
        raise ConfigError(f"unknown options or values {' '.join(unknown)}; --help lists the options that there are")
    return tuple(parsed)


def _option_name(word: str) -> str:
    """Return the name of a field that `--name`, `--name=value` or `--na-me` sets."""
    return word.removeprefix("--").partition("=")[0].replace("-", "_")


def _read_options(file: str) -> dict[str, Any]:
    try:
        options = yaml.load(Path(file).read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {file} cannot be read as YAML: {error}") from error
    if options is None:
        return {}
    if not isinstance(options, dict):
        raise ConfigError(f"--config {file} holds a {type(options).__name__}; write one `option: value` a line")
    return {_option_name(str(name)): value for name, value in options.items()}


def _is_one_word(hint: Any) -> bool:
    """Whether an option of this type may be a list, of which a command line takes one word: report_to is such."""
    parts = typing.get_args(hint)
    return str in parts and any(typing.get_origin(part) is list for part in parts)


def _check_lists(options: dict[str, Any]) -> None:
    """Refuse null in lists."""
    for name, value in options.items():
        if isinstance(value, list) and None in value:
            raise ConfigError(f"{name} holds null in a list, {value}; remove it, or write a value")


def _check_nulls(names: set[str], types: dict[str, Any], file: str) -> None:
    """Refuse null for unknown options, and for those whose type does not have None."""
    for name in sorted(names):
        if name not in types:
            raise ConfigError(f"unknown option {name} in {file}; --help lists the options that there are")
        if type(None) not in typing.get_args(types[name]):
            raise ConfigError(f"{name} is null in {file}, but may not be None; give it a value, or leave it out")


def _words(name: str, value: Any) -> Iterator[str]:
    """Yield an option of the file as words of a command line."""
    if not isinstance(value, list):
        yield f"--{name}={_word(value)}"
        return
    yield f"--{name}"
    yield from map(_word, value)


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)
