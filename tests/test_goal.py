"""The goal of a study: the mode that a metric's name says, and the origin of a study's mode."""

from pathlib import Path

import pytest

import penstock as ps
from penstock.goal import mode_of
from penstock.log.events import Opened
from penstock.report.summary import history_of, study_facts
from penstock.report.tables import console, study_summary
from tests.studies import log, studies

SMALL = "loss val_loss loss/val train.loss error err perplexity ppl rmse mse mae nll cross_entropy crossEntropy wer cer"
SMALL += " bpc bpd fid kl latency regret EvalLoss test/top5_error val-rmse loss2 mse_loss"
LARGE = "accuracy acc f1 auc auroc precision recall bleu rouge score reward return map miou iou dice r2 ndcg hit@10"
LARGE += " eval-accuracy top1_accuracy valAcc1 mAP mAP50 F1_macro rougeL rouge2 episode_reward val/acc 5-shot-accuracy"
SILENT = "distance x loss_accuracy error_score neg_loss accuracy_drop loss_std step_time seconds"
SILENT += " negative_log_likelihood entropy glossy scores_lost mapping lossless -loss 1 1-accuracy jaccard_distance"
SILENT += " dice_distance time_to_success success_time hit_time epochs_to_accuracy accuracy_time return_code returnCode"
SILENT += " penalty_score anomaly_score toxicity_score error_free loss_free 1-loss 1.0-loss 100-acc \u2212loss inv_loss"
SILENT += " reciprocal_loss LossFree"


def distance(trial):
    for unit in range(1, trial.number + 2):
        trial.report(unit, distance=unit + trial.config["x"], loss=float(trial.number))


study = studies(distance, {"x": ps.uniform(0, 1)}, algorithm=ps.Random(budget=2), trials=3)


def unsaid(metric, **settings):
    return study(metric=metric, mode=None, **settings)


@pytest.mark.parametrize(("names", "mode"), [(SMALL, "min"), (LARGE, "max"), (SILENT, None)])
def test_a_metrics_name_says_its_mode(names, mode):
    assert {name: mode_of(name) for name in names.split()} == dict.fromkeys(names.split(), mode)


def test_a_loss_without_a_mode_is_made_small_and_show_says_so():
    result = unsaid("loss").run(progress=False)
    assert result.best.number == 0
    assert "loss min (by its name)" in "".join(_summary(result.dir))
    (opened,) = [event for event in log() if isinstance(event, Opened)]
    assert (opened.settings["mode"], opened.settings["mode_from"]) == ("min", "name")


def test_a_mode_that_is_given_is_not_explained():
    result = study(metric="loss", mode="max").run(progress=False)
    assert result.best.number == 2
    assert "loss max\n" in "".join(line.rstrip() + "\n" for line in _summary(result.dir))


def test_a_name_that_does_not_say_it_needs_a_mode():
    with pytest.raises(ps.StudyError, match="got none for 'distance': give mode=\"max\""):
        unsaid("distance")
    with pytest.raises(ps.StudyError, match='mode must be "min" or "max", got 3'):
        study(mode=3)
    assert not Path(".penstock").exists()


def test_a_study_goes_on_with_the_mode_of_its_log():
    study(metric="loss", mode="max", trials=2).run(progress=False)
    result = unsaid("loss", trials=3).run(progress=False)
    assert result.best.number == 2
    assert "loss max (as its log began)" in "".join(_summary(result.dir))
    assert unsaid("loss", name="other").mode == "min", "another study is no part of that log"


def _summary(dir):
    out = console()
    with out.capture() as said:
        out.print(study_summary(study_facts(dir, history_of(dir))))
    return said.get().splitlines(keepends=True)
