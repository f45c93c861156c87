# SPDX-License-Identifier: Apache-2.0
"""BLEU and ROUGE of decoded text, by the reference packages."""

from collections.abc import Sequence


def bleu(predictions: Sequence[str], references: Sequence[str]) -> float:
  """Corpus BLEU, 0 to 100, as sacrebleu computes it by default."""
  import sacrebleu

  return float(sacrebleu.corpus_bleu(predictions, [references]).score)


def rouge_l(predictions: Sequence[str], references: Sequence[str]) -> float:
  """Mean ROUGE-L F1, 0 to 100, with stemming."""
  from rouge_score import rouge_scorer

  scorer = rouge_scorer.RougeScorer(['rougeL'], use_stemmer=True)
  scores = [
    scorer.score(reference, prediction)['rougeL'].fmeasure
    for prediction, reference in zip(predictions, references)
  ]
  return 100.0 * sum(scores) / len(scores)


METRICS = {'bleu': bleu, 'rouge_l': rouge_l}


def measure(
  metric: str, predictions: Sequence[str], references: Sequence[str]
) -> dict[str, float]:
  """{metric: score} of one of `METRICS`."""
  return {metric: METRICS[metric](predictions, references)}
