# SPDX-License-Identifier: Apache-2.0
"""Values against the types and bounds that they should keep, all at once."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import inspect
import types
import typing
from typing import Any


def mistyped(owner: Callable, values: Mapping[str, Any]) -> list[str]:
  """What is not of the type that a class or a function declares for it.

  Args:
    owner: its annotations count.
    values: by the names of its fields or arguments; others are ignored.
  """
  return [
    f'Expected {label(owner)}.{name} to be of type'
    f' {inspect.formatannotation(parameter.annotation)}, got {values[name]!r}.'
    ' Bind a value of this type.'
    for name, parameter in inspect.signature(owner).parameters.items()
    if name in values and not _fits(values[name], parameter.annotation)
  ]


def below(least: float, values: Mapping[str, Any], *names: str) -> list[str]:
  """Those values, or entries of values, that are less than `least`.

  None stands for a default and is let through, as are names without a value.
  """
  return [
    f'Expected {name} >= {least}, got {values[name]!r}. Raise it.'
    for name in names
    if any(x < least for x in _entries(values.get(name)))
  ]


def label(owner: Callable) -> str:
  """module.name, as gin files have it."""
  module = (owner.__module__ or '').rpartition('.')[2]
  return f'{module}.{owner.__name__}'


def _entries(value: Any) -> Sequence[Any]:
  if value is None:
    return ()
  return value if isinstance(value, list | tuple) else (value,)


def _fits(value: Any, kind: Any) -> bool:
  """isinstance for annotations; an int is a float, and no bool is a number."""
  if kind in (Any, inspect.Parameter.empty):
    return True
  origin, parts = typing.get_origin(kind), typing.get_args(kind)
  if origin in (types.UnionType, typing.Union):
    return any(_fits(value, part) for part in parts)
  if origin in (tuple, Sequence):
    several = tuple if origin is tuple else list | tuple
    return isinstance(value, several) and all(_fits(x, parts[0]) for x in value)
  if kind in (int, float):
    return isinstance(value, int | kind) and not isinstance(value, bool)
  return isinstance(value, origin or kind)
