# SPDX-License-Identifier: Apache-2.0
"""Gin files, with everything wrong in them named at once.

Every binding must have an effect: those that nothing can reach are refused,
since gin itself says nothing about a mistyped scope or macro.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
import difflib
import functools
import importlib.util
import inspect
import os
import re
from typing import Any

import gin

from spec_decode import checks


class ConfigError(ValueError):
  """A configuration that was refused before any work began."""


def parse(
  files: Sequence[str], bindings: Sequence[str], search_paths: Sequence[str]
) -> None:
  """Reads gin files and bindings.

  Raises:
    ConfigError: missing files, whatever gin cannot make sense of, or, where
      there is nothing of these, macros without a value; all that are found.
  """
  for path in search_paths:
    gin.add_config_file_search_path(path)
  problems = []
  for place, parse_one in (
    *((f, functools.partial(_parse_file, f, search_paths)) for f in files),
    *((b, functools.partial(gin.parse_config, b)) for b in bindings),
  ):
    try:
      parse_one()
    except Exception as error:  # gin raises what the values raise
      hint = ''
      if isinstance(error, SyntaxError):
        hint = ' Text needs quotes of its own: --gin.NAME="\'text\'".'
      problems.append(f'In {place}: {words(error)}{hint}')
  problems = problems or [
    f'Expected a value for {name}, got none. Give --gin.{name}=...'
    for name in _macros_without_values()
  ]
  if not problems:
    try:
      gin.finalize()
    except Exception as error:  # such as a value that a file calls required
      problems.append(f'In the configuration: {words(error)}')
  _refuse(problems)


def arguments(called: Callable, *given: Any) -> dict[str, Any]:
  """All that a call gets: what is given, what gin binds, and defaults.

  Raises:
    ConfigError: a bound value cannot be made, or an argument has none.
  """
  try:
    bound = _bindings(called)
    call = inspect.signature(called).bind(*given, **bound)
  except Exception as error:  # gin raises what the values raise
    raise ConfigError(
      f'In the arguments of {checks.label(called)}: {words(error)}'
    ) from error
  call.apply_defaults()
  return call.arguments


def _bindings(called: Callable) -> dict[str, Any]:
  """Arguments that gin will add to a call; none if it does not know it."""
  known = gin.config._inverse_lookup(called, allow_decorators=True)
  if known is None:
    return {}
  # What a reference such as @scope/name gives keeps the scope to itself.
  scope = inspect.getclosurevars(called).nonlocals.get('scope_components', ())
  return gin.get_bindings('/'.join([*scope, known.selector]))


def words(error: Exception) -> str:
  """What an error says, without the call that gin adds to it."""
  return re.sub(r"\n +In call to configurable '[^\n]*", '', str(error))


def _refuse(problems: Sequence[str]) -> None:
  if problems:
    raise ConfigError('\n  '.join(['nothing was run:', *problems]))


def _parse_file(file: str, search_paths: Sequence[str]) -> None:
  if not any(os.path.exists(os.path.join(p, file)) for p in search_paths):
    raise FileNotFoundError(
      f'Expected a gin file {file!r}, found none in {list(search_paths)}.'
    )
  gin.parse_config_file(file)


def _macros_without_values() -> list[str]:
  """Names referred to as %NAME, or called required, that have no value."""
  config = gin.config._CONFIG
  named = {
    scope
    for parameters in config.values()
    for value in parameters.values()
    for scope, selector in _references(value, '')
    if selector == 'gin.macro'
  }
  given = {scope for scope, selector in config if selector == 'gin.macro'}
  required = {
    name
    for name in given
    if ('gin.REQUIRED', 'gin.constant')
    in _references(config[name, 'gin.macro']['value'], '')
  }
  return sorted(named - given | required)


def t5x_search_paths() -> list[str]:
  """Where the names of T5X's own gin files begin, if it is installed."""
  package = importlib.util.find_spec('t5x')
  folders = package.submodule_search_locations if package else []
  return [os.path.dirname(folder) for folder in folders]


def refuse_idle_names(entry: Callable) -> None:
  """Refuses macros and scopes that no binding below or beside `entry` names.

  Whatever is bound without a scope is let through with all that it refers to:
  T5X's own files bind its model, which ours stands in for, and a file may put
  n-gram tables in the place of a network.

  Args:
    entry: a function of T5X.

  Raises:
    ConfigError: there are any.
  """
  beside = [selector for scope, selector in gin.config._CONFIG if not scope]
  _refuse(unreachable_bindings(entry, beside))


def unreachable_bindings(
  root: Callable, beside: Iterable[str] = ()
) -> list[str]:
  """Bindings that no path of references from `root` or `beside` leads to."""
  config = gin.config._CONFIG  # gin offers no other way to walk it
  wanted = gin.config._REGISTRY.get_match(
    f'{root.__module__}.{root.__name__}'
  ) or gin.config._REGISTRY.get_match(root.__name__)
  if wanted is None or not config:
    return []  # called directly, without a gin file
  reached: set[tuple[str, str]] = set()
  queue = [('', selector) for selector in (wanted.selector, *beside)]
  while queue:
    scope, selector = queue.pop()
    if (scope, selector) in reached:
      continue
    reached.add((scope, selector))
    for (at, name), parameters in config.items():
      inherits = at == scope or scope.startswith(at + '/') or not at
      if name == selector and inherits:
        reached.add((at, name))
        for value in parameters.values():
          queue.extend(_references(value, scope))
  known = sorted({_label(*key) for key in reached})
  found = []
  for key in config:
    if key not in reached and key[1] != 'gin.constant':
      label = _label(*key)
      near = difflib.get_close_matches(label, known, n=1)
      hint = f' Did you mean {near[0]}?' if near else ''
      found.append(f'{label} is bound, but nothing that runs uses it.{hint}')
  return found


def _label(scope: str, selector: str) -> str:
  if selector == 'gin.macro':
    return scope
  return f'{scope}/{selector}' if scope else selector


def _references(value: Any, scope: str) -> Iterable[tuple[str, str]]:
  """(scope, selector) of every configurable inside a bound value."""
  if isinstance(value, gin.config.ConfigurableReference):
    inner = '/'.join(value.scoped_selector.split('/')[:-1])
    selector = value.configurable.selector
    # A reference without a scope of its own inherits the one around it.
    yield (inner or (scope if selector != 'gin.macro' else ''), selector)
  elif isinstance(value, dict):
    for item in value.items():
      yield from _references(list(item), scope)
  elif isinstance(value, list | tuple):
    for item in value:
      yield from _references(item, scope)
