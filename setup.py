# SPDX-License-Identifier: Apache-2.0
"""Packaging. Tool settings are in pyproject.toml."""

import pathlib

import setuptools

DATA = ['seqio', 'tensorflow-datasets', 't5', 'importlib-resources']
T5X = [
  'jax<0.11',
  'cached_property',
  'clu',
  'fiddle',
  'grain',
  'jaxtyping',
  'tensorboard',
]
NOTEBOOKS = ['ipykernel', 'pandas>=2.0']
TEST = [
  *NOTEBOOKS,
  'nbclient',
  'pytest>=8',
  'pytest-xdist>=3.5',
  'ruff>=0.6',
  'scipy>=1.11',
]

setuptools.setup(
  name='spec_decode',
  version='0.1.0',
  description='Speculative decoding in JAX, exact and measured',
  long_description=pathlib.Path('README.md').read_text(encoding='utf-8'),
  long_description_content_type='text/markdown',
  license='Apache-2.0',
  python_requires='>=3.11',
  packages=setuptools.find_packages(include=['spec_decode', 'spec_decode.*']),
  package_data={'spec_decode': ['assets/**/*']},
  install_requires=[
    'absl-py>=2.0',
    'etils[epath]>=1.5',
    'flax>=0.10',
    'gin-config>=0.5',
    'jax>=0.6',
    'matplotlib>=3.8',
    'numpy>=1.26',
    'optax>=0.2.4',
    'orbax-checkpoint>=0.11.19',
    'pillow>=10',
    'rich>=13',
    'rouge-score>=0.1.2',
    'sacrebleu>=2.4',
    'safetensors>=0.6.2',
    'sentencepiece>=0.2',
    'tensorstore>=0.1.60',
    'tqdm>=4.66',
  ],
  extras_require={
    # SeqIO and TFDS tasks. They bring TensorFlow. TFDS imports
    # importlib_resources without asking for it. t5 requires the nightlies of
    # both, which lie in the same folders and are older; asked for here
    # too, the releases come last, since pip installs what others need first.
    # Where they were there before, install them again:
    # pip install --force-reinstall --no-deps seqio tensorflow-datasets
    'data': DATA,
    # What T5X needs. T5X itself has no release and requires what contradicts
    # itself: scripts/t5x_requirements.txt, with --no-deps. It still uses parts
    # of JAX that are deprecated, hence the bound.
    't5x': DATA + T5X,
    # Comparison with Hugging Face's T5.
    'parity': ['torch==2.13.0', 'transformers>=5'],
    'notebooks': NOTEBOOKS,
    'test': TEST + DATA,
    'dev': TEST + ['pre-commit', 'nbstripout'],
  },
)
