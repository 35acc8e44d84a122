"""YAML that people write: plain values, and what would be lost or guessed silently is refused."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import accumulate
from pathlib import Path
from typing import Any

import yaml

from loragate.core.files import read_regular


class YamlFileError(ValueError):
    """The file cannot be read or is no YAML; the message names the file and, if known, the line."""


class _OneOfEachKey(yaml.SafeLoader):
    """YAML forbids a key that a mapping has twice; PyYAML keeps the last and drops the others."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            if key.value in seen:
                problem = f"{key.value!r} is given twice, first in line {seen[key.value]}"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen[key.value] = line
        return super().construct_mapping(node, deep)

    def construct_yaml_timestamp(self, node: yaml.ScalarNode) -> Any:
        try:
            return super().construct_yaml_timestamp(node)
        except ValueError as error:
            problem = f"there is no date {node.value!r}: {error}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error


_OneOfEachKey.add_constructor("tag:yaml.org,2002:timestamp", _OneOfEachKey.construct_yaml_timestamp)


# libyaml composes nodes by calls of C, which end the process where they are too many
_DEEPEST_IN_C = 100


def compose(text: str) -> yaml.Node | None:
    """`yaml.compose` with the safe loader: by libyaml, which is several times as fast, where it is
    there and takes the text, else by Python, whose messages say more. Raises yaml.YAMLError, and
    RecursionError for what is nested too deeply."""
    if yaml.__with_libyaml__:
        try:
            if not _is_deep(text):
                return yaml.compose(text, Loader=yaml.CSafeLoader)
        except yaml.YAMLError:
            pass
    return yaml.compose(text, Loader=yaml.SafeLoader)


def _is_deep(text: str) -> bool:
    """Whether collections are nested too deeply, by their starts and ends alone."""
    events = yaml.parse(text, Loader=yaml.CSafeLoader)
    steps = (
        isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        for event in events
    )
    return any(depth > _DEEPEST_IN_C for depth in accumulate(steps))


def read_yaml(path: Path) -> Any:
    """What the YAML file at `path` holds; None where it holds nothing. Raises YamlFileError."""
    try:
        return yaml.load(read_regular(path), Loader=_OneOfEachKey)
    except OSError as error:
        raise YamlFileError(f"{path}: cannot be read: {error.strerror}") from error
    except yaml.constructor.ConstructorError as error:
        raise YamlFileError(f"{path}{_line(error)}: {error.problem}") from error
    except yaml.MarkedYAMLError as error:
        raise YamlFileError(f"{path}{_line(error)}: is not YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise YamlFileError(f"{path}: is not YAML: {error}") from error
    except RecursionError as error:
        raise YamlFileError(f"{path}: is nested too deeply") from error
    # a value that Python cannot make, as a number of thousands of digits
    except ValueError as error:
        raise YamlFileError(f"{path}: {error}") from error


def _line(error: yaml.MarkedYAMLError) -> str:
    return f":{error.problem_mark.line + 1}" if error.problem_mark else ""
