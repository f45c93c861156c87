# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding in JAX (Leviathan, Kalman, Matias, ICML 2023)."""

from spec_decode.autoregressive import Limits
from spec_decode.drafts import ModelDraft
from spec_decode.language_model import LanguageModel
from spec_decode.randomness import row_keys
from spec_decode.sampling import Sampling
from spec_decode.speculative import Speculation
from spec_decode.speculative import decode
from spec_decode.speculative import stream

__all__ = [
  'LanguageModel',
  'Limits',
  'ModelDraft',
  'Sampling',
  'Speculation',
  'decode',
  'row_keys',
  'stream',
]
