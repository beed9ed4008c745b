"""YAML in which no key is there twice: of two values a usual reader silently takes the last."""

from __future__ import annotations

from typing import Any

import yaml

from flatrock.core.errors import ConfigError

MERGE = "tag:yaml.org,2002:merge"


class _Once(yaml.SafeLoader):
    """Plain values and nothing else, as yaml.safe_load reads them."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Looks before merge keys (<<) are filled in: what they bring gives way to what is there."""
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == MERGE:
                continue
            name = key.tag, key.value
            if name in lines:
                told = f"the key {key.value!r} is there twice, first in line {lines[name]}; keep one"
                raise yaml.MarkedYAMLError(problem=told, problem_mark=key.start_mark)
            lines[name] = key.start_mark.line + 1
        return node


def read_yaml(text: str | bytes, where: str) -> Any:
    """What a YAML text says; ConfigError names `where` and the line if it cannot be read or says a key twice."""
    try:
        loader = _Once(text)
        loader.name = where
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except (yaml.YAMLError, ValueError) as error:
        cure = "\nYAML allows no tabs there: use spaces" if r"'\t'" in str(error) else ""
        raise ConfigError(f"{where} is not readable YAML: {error}{cure}") from error
