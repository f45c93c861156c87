# SPDX-License-Identifier: Apache-2.0
"""How often programs are compiled, and what is in them."""

import contextlib
import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_models

from spec_decode import autoregressive
from spec_decode import speculative
from spec_decode.autoregressive import Limits
from spec_decode.drafts import ModelDraft
from spec_decode.drafts import UniformDraft
from spec_decode.language_model import PARKED
from spec_decode.models import transformer
from spec_decode.randomness import row_keys
from spec_decode.sampling import Sampling
from spec_decode.speculative import Speculation

GREEDY = Sampling(0.0)
_compiled = []


def _listen(event, duration, **kwargs):
  if event == '/jax/core/compile/backend_compile_duration':
    _compiled.append(kwargs.get('fun_name', ''))


jax.monitoring.register_event_duration_secs_listener(_listen)


@contextlib.contextmanager
def compiles(*names):
  """Fails unless just these functions are compiled, small helpers apart."""
  before = len(_compiled)
  yield
  names = [f'jit({name})' for name in names]
  loops = ('jit(decode)', 'jit(init)', 'jit(step)')
  new = _compiled[before:]
  assert [name for name in new if not names or name in loops] == names


def toy_config(**change):
  """Built anew each time: equality counts, not identity."""
  model = toy_models.table_model(6)
  sampling = Sampling(0.0, forbidden=(0, 5))
  values = {
    'target': model,
    'draft': ModelDraft(model, sampling, 2),
    'sampling': sampling,
    'limits': Limits(13, 2),
  }
  return Speculation(**(values | change))


def toy_args(seed):
  params = toy_models.table_params(seed, 6)
  args = (
    params,
    toy_models.nearby(params, seed),
    jnp.asarray([[seed], [3], [4]], jnp.int32),
    row_keys(seed, np.arange(3) + seed),
    (jnp.full((3, 2), seed, jnp.int32), jnp.asarray([1, 2, 1], jnp.int32)),
  )
  return jax.block_until_ready(args)


def test_one_compilation_per_configuration():
  first, second = toy_args(1), toy_args(2)
  with compiles('decode'):
    jax.block_until_ready(speculative.decode(toy_config(), *first))
  # Other parameters, inputs, prompts and seeds; the configuration built anew.
  with compiles():
    jax.block_until_ready(speculative.decode(toy_config(), *second))
  with compiles('decode'):
    jax.block_until_ready(
      speculative.decode(toy_config(limits=Limits(14, 2)), *second)
    )
  with compiles():
    jax.block_until_ready(speculative.decode(toy_config(), *first))


def test_one_compilation_of_plain_decoding():
  first, second = toy_args(1), toy_args(2)

  def decode(args):
    params, _, *rest = args
    sampling, limits = Sampling(0.0, forbidden=(0, 4)), Limits(13, 2)
    model = toy_models.table_model(6)
    jax.block_until_ready(
      autoregressive.decode(model, sampling, limits, params, *rest)
    )

  with compiles('decode'):
    decode(first)
  with compiles():
    decode(second)


def test_what_a_target_makes_of_its_inputs_is_compiled_for_all_its_drafts():
  params, draft_params, inputs, keys, prompt = toy_args(1)
  before = len(_compiled)
  results = []
  for draft, its_params in (
    (ModelDraft(toy_models.table_model(6), GREEDY, 5), draft_params),
    (ModelDraft(toy_models.table_model(6), Sampling(0.5), 5), draft_params),
    (UniformDraft(6, 5), None),
  ):
    config = toy_config(draft=draft, limits=Limits(17, 2))
    caches = speculative.start(config, params, its_params, inputs, prompt)
    results.append(
      speculative.decode_from(config, params, its_params, caches, keys, prompt)
    )
  new = _compiled[before:]
  assert new.count('jit(prefill)') == 1
  assert new.count('jit(decode_from)') == 3
  for result in results[1:]:  # greedy
    np.testing.assert_array_equal(result.tokens, results[0].tokens)


def test_a_stream_compiles_its_two_functions_once():
  first, second = toy_args(1), toy_args(2)
  with compiles('init', 'step'):
    blocks = len(list(speculative.stream(toy_config(), *first)))
  with compiles():
    blocks += len(list(speculative.stream(toy_config(), *second)))
  assert blocks > 4


# --- the program of a T5 pair -----------------------------------------------

# Large enough that one closed-over array would show.
CONFIG = toy_models.TINY_T5.replace(vocab_size=300, emb_dim=32)
DRAFT_CONFIG = CONFIG.replace(emb_dim=16, num_heads=2, num_decoder_layers=1)
ROWS, INPUTS, LIMITS, GAMMA = 4, 9, Limits(40, 1), 3
CAPACITY = 48  # 1 + 40 + GAMMA + 2, in eights


def shapes_of(params):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)


@functools.cache
def arguments(layout):
  model = transformer.language_model(CONFIG, None, layout)
  params = jax.eval_shape(model.prepare, toy_models.t5_shapes(CONFIG))
  return (
    model,
    params,
    toy_models.t5_shapes(DRAFT_CONFIG),
    jax.ShapeDtypeStruct((ROWS, INPUTS), jnp.int32),
    shapes_of(row_keys(0, np.arange(ROWS))),
  )


def lower(
  model, sampling, params, draft_params, inputs, keys, draft=DRAFT_CONFIG
):
  draft = transformer.language_model(draft)
  draft = ModelDraft(draft, sampling, GAMMA)
  config = Speculation(model, draft, sampling, LIMITS)
  return speculative.decode.lower(config, params, draft_params, inputs, keys)


def constant_bytes(text):
  """Bytes of the array constants in a StableHLO program."""
  total = 0
  for value in re.findall(r'stablehlo\.constant dense<(.*?)> :', text, re.S):
    if value.startswith('"0x'):
      total += (len(value) - 4) // 2
    elif value.startswith('['):
      total += 4 * (value.count(',') + 1)
  return total


@pytest.mark.parametrize('sampling', [GREEDY, Sampling()], ids=str)
def test_parameters_are_arguments(sampling):
  model, *args = arguments('fused')
  text = lower(model, sampling, *args).as_text()
  # Tables of the relative position buckets, 1 KB in each attention.
  assert 1000 < constant_bytes(text) < 10_000
  assert text.count('tensor<300x32xf32>') > 0
  model, params, _, inputs, keys = arguments('fused')
  text = autoregressive.decode.lower(
    model, sampling, LIMITS, params, inputs, keys
  ).as_text()
  assert 1000 < constant_bytes(text) < 10_000


def test_closed_over_parameters_would_be_found():
  model, params, _, inputs, keys = arguments('fused')
  closed = jnp.asarray(np.random.default_rng(0).normal(size=(300, 32)))

  def extend(params, cache, tokens, position):
    hidden, cache = model.extend(params, cache, tokens, position)
    return hidden + closed[tokens], cache

  leaky = dataclasses.replace(model, extend=extend)
  text = autoregressive.decode.lower(
    leaky, GREEDY, LIMITS, params, inputs, keys
  ).as_text()
  assert constant_bytes(text) > closed.nbytes


def computations(text):
  """name -> lines of each computation of a compiled program."""
  found, name = {}, None
  for line in text.splitlines():
    if line and not line.startswith((' ', '}')):
      name = line.removeprefix('ENTRY ').split()[0].lstrip('%')
      found[name] = []
    elif name:
      found[name].append(line)
  return found


def in_loops(text):
  """Lines of all computations that loops call, and whatever these call."""
  found = computations(text)
  pending = re.findall(r'body=%?([\w.-]+)', text)
  assert pending
  seen = {}
  while pending:
    name = pending.pop()
    if name not in seen:
      seen[name] = found[name]
      pending += re.findall(r'%([\w.-]+)', ' '.join(seen[name]))
      pending = [name for name in pending if name in found]
  return [line for lines in seen.values() for line in lines]


def compiled(lowered):
  """The optimised program as text.

  Compiled as it would be where it is used, whatever scripts/test.sh leaves out.
  """
  options = {'xla_cpu_use_fusion_emitters': True}
  return lowered.compile(compiler_options=options).as_text()


def cache_sized_work(text, rows=ROWS, draft=DRAFT_CONFIG):
  """Operations inside loops that make a whole cache anew."""
  sizes = {
    config.num_heads * rows * CAPACITY * config.head_dim
    for config in (CONFIG, draft)
  }
  harmless = {'parameter', 'get-tuple-element', 'bitcast', 'scatter'}
  found = []
  for line in in_loops(text):
    operation = re.match(
      r'\s+(?:ROOT )?%?\S+ = \w+\[([\d,]+)\]\S* ([\w-]+)\(', line
    )
    if not operation or operation[2] in harmless:
      continue
    if operation[2] == 'fusion' and 'calls=%wrapped_scatter' in line:
      continue  # writes its chunk in place
    dims = [int(d) for d in operation[1].split(',')]
    if CAPACITY in dims and math.prod(dims) in sizes:
      found.append(line.strip())
  return found


@pytest.fixture(scope='module')
def sampling_program():
  model, *args = arguments('fused')
  return compiled(lower(model, Sampling(), *args))


def host_traffic(text):
  """Operations inside loops that wait for the host."""
  pattern = r' (?:infeed|outfeed|send|recv)(?:-done)?\(|callback'
  return [line for line in in_loops(text) if re.search(pattern, line)]


def test_loops_do_without_the_host(sampling_program):
  assert host_traffic(sampling_program) == []

  def step(i):
    jax.debug.callback(lambda i: None, i)
    return i + 1

  talks = jax.jit(lambda i: jax.lax.while_loop(lambda i: i < 9, step, i))
  assert host_traffic(compiled(talks.lower(0)))


def projected_inputs(lines):
  """Products that have a head's keys or values for every input."""
  sizes = {
    ROWS * INPUTS * config.num_heads * config.head_dim
    for config in (CONFIG, DRAFT_CONFIG)
  }
  found = re.findall(r' = \w+\[([\d,]+)\]\S* dot\(', '\n'.join(lines))
  products = [math.prod(map(int, dims.split(','))) for dims in found]
  return sum(size in sizes for size in products), len(products)


def test_inputs_are_projected_before_the_loops(sampling_program):
  inside, products = projected_inputs(in_loops(sampling_program))
  assert products > 20 and inside == 0
  # Keys and values for 2 layers of the target and 1 of the draft; the queries,
  # keys and values of the encoders are others of this size.
  everywhere, _ = projected_inputs(sampling_program.splitlines())
  assert everywhere >= 6


def test_caches_are_updated_in_place(sampling_program):
  text = sampling_program
  shapes = rf'\[\d+,({CAPACITY},8|8,{CAPACITY})\]'
  scatters = re.findall(rf'{shapes}\S* scatter\(', text)
  # Keys and values: 2 layers of the target, 1 of the draft in two places.
  assert len(scatters) == 8
  assert cache_sized_work(text) == []


def test_the_cache_of_one_row_and_one_head_is_updated_in_place():
  model, params, _, _, keys = arguments('fused')
  narrow = DRAFT_CONFIG.replace(num_heads=1)
  inputs = jax.ShapeDtypeStruct((1, INPUTS), jnp.int32)
  keys = jax.ShapeDtypeStruct((1, *keys.shape[1:]), keys.dtype)
  program = lower(
    model, GREEDY, params, toy_models.t5_shapes(narrow), inputs, keys, narrow
  )
  assert cache_sized_work(compiled(program), 1, narrow) == []


@pytest.mark.parametrize('copies', [False, True])
def test_caches_of_plain_decoding_are_updated_in_place(copies):
  # And a select over the cache, one way to freeze rows, would be found.
  plain, params, _, inputs, keys = arguments('fused')

  def extend(params, cache, tokens, position):
    hidden, new = plain.extend(params, cache, tokens, position)
    running = jnp.repeat(position < PARKED, CONFIG.num_heads)[:, None, None]
    keep = lambda a, b: jnp.where(running, a, b)
    return hidden, new.replace(keys=tuple(map(keep, new.keys, cache.keys)))

  model = dataclasses.replace(plain, extend=extend) if copies else plain
  limits = Limits(40, 1)
  lowered = autoregressive.decode.lower(
    model, GREEDY, limits, params, inputs, keys
  )
  found = cache_sized_work(compiled(lowered))
  assert len(found) >= 2 if copies else found == []
