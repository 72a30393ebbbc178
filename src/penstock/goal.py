"""The goal of a study: its metric, and whether that is to be large or small, where the metric's name says so."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Literal

from penstock.errors import PenstockError, StudyError
from penstock.log.events import Opened
from penstock.log.reader import read
from penstock.numeric import shown
from penstock.trial import Mode

SMALL = """
loss losses error errors err perplexity ppl rmse mse mae mape smape rmsle nll bce crossentropy cer wer eer bpc bpd bpb
fid kid kl kld divergence latency regret brier ece lpips misclassification
"""
LARGE = """
accuracy acc f1 auc auroc auprc ap map precision recall sensitivity specificity bleu rouge meteor chrf score reward
rewards return returns miou iou jaccard dice r2 ndcg mrr hit hits mcc kappa psnr ssim likelihood loglikelihood
throughput success
"""
TURNS = """
neg negative inverse inverted inv reciprocal minus one non free drop gap std var variance delta diff difference
reduction improvement gain decrease increase distance dissimilarity time seconds duration speed to epochs returncode
penalty penalties anomaly outlier toxicity hate risk
"""  # words with which a large value may be a bad one, or the other way round
MINUS = r"\s*(1(\.0*)?|100)?\s*[-\u2010-\u2015\u2212]"  # at the beginning, as in "-loss" and "1 - accuracy"
ModeFrom = Literal["given", "name", "log"]
"""Where a study's mode comes from: ``mode=``, the metric's name, or the log with which the study goes on."""


def mode_of(metric: str) -> Mode | None:
    """The mode that a metric's name says; None where the name says nothing, or two things.

    >>> mode_of("val_loss"), mode_of("eval-accuracy"), mode_of("top1Accuracy"), mode_of("test/rouge2")
    ('min', 'max', 'max', 'max')
    >>> mode_of("distance"), mode_of("accuracy_loss"), mode_of("neg_loss"), mode_of("1-accuracy")
    (None, None, None, None)
    """
    parts = [part.lower() for part in re.findall(r"[A-Za-z]+\d*", re.sub(r"(?<=[a-z\d])(?=[A-Z])", "_", metric))]
    words = {*parts, *(part.rstrip("0123456789") for part in parts), *(a + b for a, b in pairwise(parts))}
    small, large, turned = (not words.isdisjoint(known.split()) for known in (SMALL, LARGE, TURNS))
    if small == large or turned or re.match(MINUS, metric):
        return None
    return "min" if small else "max"


def choose_mode(metric: str, mode: object, log: Path | None) -> tuple[Mode, ModeFrom]:
    """A study's mode and its origin: as given; else as in the log that the study goes on with; else by the name."""
    if mode is not None:
        if not isinstance(mode, str) or mode not in ("min", "max"):
            raise StudyError(f'mode must be "min" or "max", got {shown(mode)}.')
        return ("min" if mode == "min" else "max"), "given"
    if log is not None and (before := _logged(log, metric)) is not None:
        return before
    said = mode_of(metric)
    if said is None:
        raise StudyError(
            f'mode must be "min" or "max" where the metric\'s name does not say it, got none for {metric!r}: give '
            'mode="max" to make it as large as possible, or mode="min". (A study that was begun when "max" was the '
            'default goes on with mode="max".)'
        )
    return said, "name"


def _logged(log: Path, metric: str) -> tuple[Mode, ModeFrom] | None:
    """The mode with which a log began; None where there is no such log, or it has another metric."""
    try:
        first = next(read(log), None) if log.is_file() else None
    except PenstockError:
        return None  # the run refuses the log, and says why
    if not isinstance(first, Opened) or first.settings.get("metric") != metric:
        return None
    mode: Mode = "min" if first.settings.get("mode") == "min" else "max"
    return mode, "name" if first.settings.get("mode_from") == "name" else "log"
