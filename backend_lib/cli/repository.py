"""The model repository that is served: a private one, linked to the source, with the user's settings written in."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import backend_lib

SHIPPED_MODEL = "llm"

# `key: "k" value: { string_value: "v" }` as it stands in a `parameters` block or list of config.pbtxt.
_PARAMETER = re.compile(
    r'(key:\s*"(?P<key>[^"]*)"\s*,?\s*value:?\s*\{\s*string_value:\s*")(?P<value>(?:[^"\\]|\\.)*)(")'
)
_COMMENT = re.compile(r"^\s*#.*$", re.MULTILINE)
_NAME = re.compile(r'^name:\s*"[^"]*"', re.MULTILINE)


def shipped_repository() -> Path:
    """The model repository that comes with Tandem: a checkout's own, or the installed one.

    Raises:
        FileNotFoundError: neither is there.
    """
    root = Path(backend_lib.__file__).resolve().parents[1]
    # `pip install --target` puts data files beside the packages, every other installation under the prefix.
    places = (root, root / "share/tandem", Path(sysconfig.get_path("data")) / "share/tandem")
    for place in places:
        if (place / "model_repository" / SHIPPED_MODEL / "config.pbtxt").is_file():
            return place / "model_repository"
    raise FileNotFoundError(f"no model_repository in {', '.join(map(str, places))}")


def read_parameters(config: str) -> dict[str, str]:
    """The string parameters of a config.pbtxt, comments aside."""
    return {found["key"]: _unescape(found["value"]) for found in _PARAMETER.finditer(_COMMENT.sub("", config))}


def write_parameters(config: str, values: Mapping[str, str]) -> str:
    """The config.pbtxt, comments dropped, with `values` in place of, or after, the parameters it has."""
    config = _COMMENT.sub("", config)

    def replace(found: re.Match[str]) -> str:
        key = found["key"]
        return f"{found[1]}{_escape(values[key])}{found[4]}" if key in values else found[0]

    added = [key for key in values if key not in read_parameters(config)]
    lines = [f'parameters {{ key: "{key}" value: {{ string_value: "{_escape(values[key])}" }} }}\n' for key in added]
    return _PARAMETER.sub(replace, config) + "\n" + "".join(lines)


def link_repository(source: Path, target: Path, *, rename: tuple[str, str], settings: Mapping[str, str]) -> None:
    """Fill `target` with links to the models of `source`; model `rename[0]` becomes `rename[1]`, with `settings`.

    Raises:
        FileNotFoundError: the model to rename is not in `source`.
    """
    old, new = rename
    if not (source / old / "config.pbtxt").is_file():
        raise FileNotFoundError(f"no {old}/config.pbtxt in {source}")
    target.mkdir(parents=True)
    for model in source.iterdir():
        if model.name != old and model.is_dir():
            (target / model.name).symlink_to(model.resolve())
    _link_model(source / old, target / new, settings)


def _link_model(source: Path, target: Path, settings: Mapping[str, str]) -> None:
    target.mkdir()
    for entry in source.iterdir():
        if entry.name != "config.pbtxt":
            (target / entry.name).symlink_to(entry.resolve())
    config = write_parameters((source / "config.pbtxt").read_text(), settings)
    (target / "config.pbtxt").write_text(_NAME.sub(f'name: "{target.name}"', config))


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"')


def _unescape(value: str) -> str:
    return re.sub(r"\\(.)", r"\1", value)
