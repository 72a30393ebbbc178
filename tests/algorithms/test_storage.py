"""The log as an Optuna storage: what samplers, plots and the dashboard see of running, paused and failed trials."""

from __future__ import annotations

import io
import json
import math
import threading
from datetime import timedelta
from typing import Any

import optuna
import pytest
from optuna.samplers._tpe.sampler import _split_trials
from optuna.trial import TrialState

import penstock as ps
from penstock.algorithms.storage import EPOCH, STUDY, LogStorage, guess
from penstock.errors import StudyError
from penstock.log.events import Asked, Dropped, Event, Failed, Opened, Placed, Reported, Wrote, decode, encode
from penstock.space import Space
from penstock.trial import Mode, Usage

SPACE = Space.of(
    {"lr": ps.loguniform(1e-4, 1), "layers": ps.randint(1, 5), "act": ps.choice(["relu", (64, 32), dict]), "epochs": 3}
)
CONFIG = {"lr": 0.1, "layers": 2, "act": (64, 32), "epochs": 3}


def asked(trial: int, budget: int = 1, **config: Any) -> Asked:
    return Asked(trial, {**CONFIG, **config}, budget, "rung 0")


def reported(trial: int, unit: int, value: float, clock: float = 0.0) -> Reported:
    return Reported(trial, 1, unit, {"loss": value}, None, Usage(), clock)


def failed(trial: int, final: bool = True, clock: float = 0.0) -> Failed:
    return Failed(trial, 1, "boom", final, clock)


def through_log(event: Event) -> Event:
    return decode(encode(event, 0), 0)


def storage_of(*events: Event, mode: Mode = "min", space: Space | None = SPACE, write: Any = None) -> LogStorage:
    storage = LogStorage("digits", "loss", mode, space, write)
    for event in events:
        storage.apply(event)
    return storage


def seen(storage: LogStorage) -> list[tuple[str, float | None]]:
    return [(trial.state.name, trial.value) for trial in storage.get_all_trials(STUDY)]


# States and values


def test_a_trial_without_a_result_is_pending_and_with_one_complete() -> None:
    storage = storage_of(asked(0), asked(1), reported(0, 1, 0.5))
    assert seen(storage) == [("COMPLETE", 0.5), ("RUNNING", None)]


def test_a_trial_shows_its_deepest_value_and_deepens() -> None:
    storage = storage_of(asked(0), reported(0, 1, 0.5), asked(0, budget=3))
    assert seen(storage) == [("COMPLETE", 0.5)], "promoted and running on: not pending"
    before = storage.get_all_trials(STUDY, deepcopy=False)
    for unit, value in ((2, 0.3), (3, 0.4)):
        storage.apply(reported(0, unit, value))
        assert seen(storage) == [("COMPLETE", value)]
    assert storage.get_trial(0).intermediate_values == {1: 0.5, 2: 0.3, 3: 0.4}
    assert before[0].value == 0.5, "what was read does not change"


def test_a_good_paused_trial_is_in_the_good_half_of_tpe() -> None:
    events: list[Event] = []
    for n in range(10):
        events += [asked(n, lr=0.01 * (n + 1)), reported(n, 1, 1.0 + n)]
    storage = storage_of(*events, asked(3, budget=9), reported(3, 2, 0.1), asked(10))
    study = optuna.load_study(study_name="digits", storage=storage)
    below, above = _split_trials(study, study.get_trials(deepcopy=False), n_below=2)
    assert [trial.number for trial in below] == [0, 3]
    assert 10 in [trial.number for trial in above], "a pending one is held to be bad"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("mode", "worst"), [("min", math.inf), ("max", -math.inf)])
def test_what_diverged_is_worst(value: float, mode: Mode, worst: float) -> None:
    assert seen(storage_of(asked(0), reported(0, 1, value), mode=mode)) == [("COMPLETE", worst)]
    missing = Reported(0, 1, 1, {"accuracy": 1.0}, None, Usage(), 0.0)
    assert seen(storage_of(asked(0), missing, mode=mode)) == [("COMPLETE", worst)]


def test_the_best_trial_goes_by_the_mode() -> None:
    events = [asked(0), asked(1), reported(0, 1, 0.5), reported(1, 1, 0.7)]
    for mode, best in (("min", 0), ("max", 1)):
        study = optuna.load_study(study_name="digits", storage=storage_of(*events, mode=mode))  # type: ignore[arg-type]
        assert (study.best_trial.number, study.metric_names) == (best, ["loss"])


def test_failures() -> None:
    storage = storage_of(asked(0), asked(1), asked(2), reported(1, 1, 0.5))
    for number in range(3):
        storage.apply(failed(number, final=number < 2))
    assert seen(storage) == [("FAIL", None), ("COMPLETE", 0.5), ("RUNNING", None)]
    storage.apply(asked(0, budget=2))
    assert seen(storage)[0] == ("RUNNING", None), "PBT asks again for a trial that failed"


def test_a_view_shows_one_budget() -> None:
    storage = storage_of(*(asked(n) for n in range(6)))
    for event in (reported(0, 1, 0.5), reported(1, 1, 0.6), reported(1, 3, 0.4), reported(2, 3, 0.2), failed(4)):
        storage.apply(event)
    storage.apply(reported(5, 3, 0.1))
    storage.apply(failed(5))
    with storage.view(3):
        assert seen(storage) == [
            ("FAIL", None),
            ("COMPLETE", 0.4),
            ("COMPLETE", 0.2),
            ("RUNNING", None),
            ("FAIL", None),
            ("COMPLETE", 0.1),
        ]
        storage.apply(reported(0, 3, 0.9))
        assert seen(storage)[0] == ("COMPLETE", 0.9)
    with storage.view(1):
        assert [name for name, _ in seen(storage)] == ["COMPLETE", "COMPLETE", "FAIL", "RUNNING", "FAIL", "FAIL"]
    assert [name for name, _ in seen(storage)] == ["COMPLETE"] * 3 + ["RUNNING", "FAIL", "COMPLETE"]


def test_a_view_ends_with_an_error_too() -> None:
    storage = storage_of(asked(0), reported(0, 1, 0.5))
    with pytest.raises(ZeroDivisionError), storage.view(9):
        raise ZeroDivisionError
    assert seen(storage) == [("COMPLETE", 0.5)]


def test_tpe_learns_only_from_the_view() -> None:
    events: list[Event] = []
    for n in range(40):
        events += [asked(n, lr=0.9 if n % 2 else 2e-4), reported(n, 3 if n % 2 else 1, 0.0 if n % 2 else -1.0)]
    drawn = {}
    for budget in (1, 3, None):
        storage = storage_of(*events, write=lambda event: None)
        sampler = optuna.samplers.TPESampler(seed=0, n_startup_trials=0)
        with storage.view(budget):
            drawn[budget] = optuna.Study("digits", storage, sampler).ask(SPACE.distributions()).params["lr"]
    assert drawn[1] < 1e-2 < drawn[3], "each budget's results lie elsewhere"
    assert drawn[None] < 1e-2, "and those of budget 1 are better"


# Configs and times


@pytest.mark.parametrize("act", ["relu", (64, 32), dict])
def test_a_config_from_the_log_becomes_parameters(act: Any) -> None:
    live, replayed = storage_of(asked(0, act=act)), storage_of(through_log(asked(0, act=act)))
    trial = replayed.get_trial(0)
    assert trial == live.get_trial(0)
    assert trial.distributions == SPACE.distributions()
    assert "epochs" not in trial.params, "a constant is no parameter"
    assert SPACE.finish(trial.params)["act"] == act


def test_a_changed_config_replaces_the_parameters() -> None:
    storage = storage_of(asked(0, lr=0.1), reported(0, 1, 0.5), asked(0, budget=2, lr=0.2))
    assert (storage.get_trial(0).params["lr"], storage.get_trial(0).value) == (0.2, 0.5)


def test_a_value_that_left_the_space_is_left_out() -> None:
    trial = storage_of(asked(0, lr=5.0)).get_trial(0)
    assert trial.params.keys() == trial.distributions.keys() == {"layers", "act"}


def test_times_come_from_the_log() -> None:
    placed = Placed(0, 1, ("cpu",), "solo", None, 4.0)
    storage = storage_of(Opened({}, 2.0), asked(0), placed, reported(0, 1, 0.5, clock=7.5), asked(1), asked(2))
    storage.apply(failed(2, clock=9.0))
    first, second, third = storage.get_all_trials(STUDY)
    assert (first.datetime_start, first.datetime_complete) == (
        EPOCH + timedelta(seconds=2),
        EPOCH + timedelta(seconds=7.5),
    )
    assert (second.datetime_start, second.datetime_complete) == (EPOCH + timedelta(seconds=7.5), None)
    assert third.datetime_complete == EPOCH + timedelta(seconds=9)


def test_other_events_change_nothing() -> None:
    storage = storage_of(asked(0), reported(0, 1, 0.5))
    before = storage.get_all_trials(STUDY)
    storage.apply(Dropped((0,)))
    assert storage.get_all_trials(STUDY) == before


def test_only_a_changed_trial_is_made_anew() -> None:
    storage = storage_of(*(asked(n) for n in range(100)))
    before = storage.get_all_trials(STUDY, deepcopy=False)
    storage.apply(reported(7, 1, 0.5))
    storage.apply(asked(8))
    storage.apply(Wrote(9, "key", 1))
    after = storage.get_all_trials(STUDY, deepcopy=False)
    assert [n for n in range(100) if before[n] is not after[n]] == [7, 9]
    assert storage.get_all_trials(STUDY)[0] is not after[0]
    assert [t.number for t in storage.get_all_trials(STUDY, states=(TrialState.COMPLETE,))] == [7]


def test_trials_may_come_in_any_order() -> None:
    assert [trial.number for trial in storage_of(asked(1), asked(0)).get_all_trials(STUDY)] == [0, 1]


def test_reading_while_feeding() -> None:
    storage = storage_of(space=None)
    errors: list[Exception] = []

    def read() -> None:
        try:
            while len(storage.get_all_trials(STUDY)) < 200:
                pass
        except Exception as error:
            errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for n in range(200):
        storage.apply(asked(n))
        storage.apply(reported(n, 1, 0.5))
    reader.join()
    assert not errors


# Writing


def test_what_a_sampler_writes_becomes_an_event_and_comes_back() -> None:
    events: list[Event] = []
    storage = storage_of(write=events.append)
    number = storage.create_new_trial(STUDY)
    storage.set_trial_system_attr(number, "generation", (1, 2))
    storage.set_trial_user_attr(number, "note", "good")
    storage.set_study_system_attr(STUDY, "qmc", 4)
    storage.set_study_user_attr(STUDY, "who", "me")
    assert events == [
        Wrote(0, "generation", [1, 2]),
        Wrote(0, "user:note", "good"),
        Wrote(None, "qmc", 4),
        Wrote(None, "user:who", "me"),
    ]
    again = storage_of(*map(through_log, events), asked(0))
    for one in (storage, again):
        assert (one.get_trial_system_attrs(0), one.get_trial_user_attrs(0)) == (
            {"generation": [1, 2]},
            {"note": "good"},
        )
        assert one.get_study_system_attrs(STUDY)["qmc"] == 4
        assert one.get_study_user_attrs(STUDY) == {"who": "me"}


def test_numbers_are_given_in_order_and_confirmed_by_asking() -> None:
    storage = storage_of(asked(0), write=lambda event: None)
    assert storage.create_new_trial(STUDY) == 1
    storage.set_trial_param(1, "lr", 0.5, SPACE.distributions()["lr"])
    assert storage.get_trial(1).params == {"lr": 0.5}
    storage.apply(asked(1))
    assert storage.get_trial(1).params["lr"] == 0.1
    assert storage.create_new_trial(STUDY) == 2


def test_what_optuna_may_not_do() -> None:
    reading, writing = storage_of(asked(0)), storage_of(asked(0), write=lambda event: None)
    lr = SPACE.distributions()["lr"]
    for storage, act in [
        (reading, lambda s: s.create_new_trial(STUDY)),
        (reading, lambda s: s.set_trial_param(0, "lr", 0.5, lr)),
        (reading, lambda s: s.set_trial_user_attr(0, "a", 1)),
        (reading, lambda s: s.set_trial_system_attr(0, "a", 1)),
        (writing, lambda s: s.create_new_trial(STUDY, s.get_trial(0))),
        (writing, lambda s: s.set_trial_state_values(0, TrialState.COMPLETE, [1.0])),
        (writing, lambda s: s.set_trial_intermediate_value(0, 1, 1.0)),
        (writing, lambda s: s.create_new_study([], "other")),
        (writing, lambda s: s.delete_study(STUDY)),
    ]:
        with pytest.raises(StudyError, match=r"Optuna can look at the study 'digits' but not .*: only Penstock writes"):
            act(storage)
    with pytest.raises(optuna.exceptions.DuplicatedStudyError):
        writing.create_new_study([], "digits")
    with pytest.raises(KeyError, match="This log holds the study 'digits', not 'other'"):
        reading.get_study_id_from_name("other")


# Looking


def finished(count: int = 12, space: Space | None = SPACE) -> LogStorage:
    storage = storage_of(Opened({"space": SPACE.describe()}), space=space)
    for n in range(count):
        config = SPACE.draw(0, n)
        for event in (Asked(n, config, 3, "rung 0"), reported(n, 1, config["lr"]), reported(n, 3, config["lr"] / 2)):
            storage.apply(through_log(event))
    storage.apply(reported(0, 4, math.nan))
    storage.apply(asked(count))
    return storage


@pytest.mark.parametrize("space", [SPACE, None])
def test_plots_and_importances(space: Space | None) -> None:
    study = optuna.load_study(study_name="digits", storage=finished(space=space))
    figure = optuna.visualization.plot_optimization_history(study)
    assert len(figure.data[0].y) >= 11
    for plot in ("intermediate_values", "slice", "parallel_coordinate", "param_importances", "timeline", "contour"):
        getattr(optuna.visualization, f"plot_{plot}")(study)
    importances = optuna.importance.get_param_importances(study)
    assert max(importances, key=lambda name: importances[name]) == "lr"
    assert study.trials_dataframe().shape[0] == 13


def test_without_a_space_the_description_in_the_log_serves() -> None:
    described, known = finished(space=None), finished()
    for a, b in zip(described.get_all_trials(STUDY), known.get_all_trials(STUDY), strict=True):
        assert (a.params, a.distributions) == (b.params, b.distributions)


def test_without_a_description_the_domains_are_guessed_alike_for_all_trials() -> None:
    storage = storage_of(space=None)
    configs = [{"lr": 10.0**-n, "m": n / 10, "n": n, "on": n > 1, "act": ["relu"]} for n in range(4)]
    for n, config in enumerate(configs):
        storage.apply(Asked(n, config, 1, ""))
        assert storage.get_trial(n).params.keys() == config.keys()
    first, *others = storage.get_all_trials(STUDY)
    assert first.distributions == guess(configs).distributions()
    assert all(trial.distributions == first.distributions for trial in others)
    ranges: dict[str, Any] = first.distributions
    assert (ranges["lr"].low, ranges["lr"].high, ranges["lr"].log) == (1e-3, 1.0, True)
    assert (ranges["m"].low, ranges["m"].high, ranges["m"].log) == (0.0, 0.3, False)
    assert ranges["n"] == optuna.distributions.IntDistribution(0, 3)
    assert ranges["on"].choices == (False, True)


def test_the_dashboard_lists_and_shows_the_study() -> None:
    import optuna_dashboard

    storage = finished(space=None)
    app = optuna_dashboard.wsgi(storage)

    def request(path: str, method: str = "GET", body: object = None) -> tuple[int, Any]:
        data, status = json.dumps(body).encode(), []
        environ = {
            "REQUEST_METHOD": method,
            "PATH_INFO": path,
            "wsgi.input": io.BytesIO(data),
            "wsgi.errors": io.StringIO(),
            "CONTENT_TYPE": "application/json",
            "CONTENT_LENGTH": str(len(data)),
        }
        answer = b"".join(app(environ, lambda line, headers, exc_info=None: status.append(int(line[:3]))))
        return status[0], json.loads(answer or b"null") if path.startswith("/api") else answer

    status, studies = request("/api/studies")
    assert (status, [s["study_name"] for s in studies["study_summaries"]]) == (200, ["digits"])
    status, study = request("/api/studies/0")
    assert status == 200
    assert [trial["state"] for trial in study["trials"]] == ["Complete"] * 12 + ["Running"]
    assert {p["name"] for p in study["trials"][0]["params"]} == {"lr", "layers", "act"}
    assert study["objective_names"] == ["loss"]
    for path in ("/api/studies/0/param_importances", "/api/studies/0/plot/contour", "/csv/0", "/dashboard"):
        assert request(path)[0] == 200
    assert request("/api/studies/0/note", "PUT", {"version": 1, "body": "hello"})[0] == 204
    assert request("/api/studies/0")[1]["note"]["body"] == "hello"
    assert request("/api/studies", "POST", {"study_name": "digits", "directions": ["minimize"]})[0] == 400
