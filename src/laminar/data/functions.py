"""Functions that the user names: one of ours, or one of the user's own."""

from collections.abc import Mapping
from importlib import import_module
from typing import TypeVar

from laminar.schema.errors import ConfigError

Function = TypeVar("Function")


def load_function(key: str, name: str, table: Mapping[str, Function]) -> Function:
    """The function that the config key names: an entry of the table, or `module:function`."""
    if name in table:
        return table[name]
    module_name, _, function_name = name.partition(":")
    try:
        function: Function = vars(import_module(module_name))[function_name]
    except (ImportError, KeyError, ValueError) as error:
        raise ConfigError(
            f"{key} is {name!r}, which is neither {', '.join(table)} nor an importable module:function ({error!r})"
        ) from error
    return function
