"""An engine owns neither its loop nor its executor: one driver runs several studies, each as if it were alone."""

from pathlib import Path

import penstock as ps
from penstock.bundle import Job
from penstock.engine.decisions import Decider
from penstock.engine.engine import Engine
from penstock.executors.simulated.executor import SimulatedExecutor
from penstock.log.events import Log, Opened, read
from penstock.log.history import History
from penstock.log.states import States
from penstock.scheduling.waterfill import waterfill

CLUSTER = ps.Simulated(devices=3, curve=ps.Curve(sharing=(1, 1.2)), start=0.5, kept=False)


def study(name, algorithm, trials=None):
    task = ps.TabulatedTask(lambda config: ps.Tabulated({"loss": [config["x"] / unit for unit in range(1, 10)]}, 1.0))
    return ps.Study(
        task, {"x": ps.uniform(0, 1)}, metric="loss", mode="min", algorithm=algorithm, trials=trials, name=name
    )


def engine_of(one, dir):
    """An engine with an executor, a log and a history of its own, opened."""
    log, decider = Log.open(Path(dir) / one.name), Decider(one.algorithm, one._search(one.trials))
    states = States.of_study(log.dir, None)
    executor = SimulatedExecutor(Job(one.task, one.seed, one.metric, one.mode, states), CLUSTER)
    engine = Engine(log, History(), decider, executor, waterfill, states=states, spreads=True)
    engine.open(Opened(one._settings(one.name)), decider.opened(one.trials))
    return engine


def lines(path):
    """The events of a log, without the settings of its first line."""
    return list(read(path / "log.jsonl"))[1:]


def test_one_driver_runs_several_studies_in_turns_and_each_is_as_if_it_were_alone():
    made = {
        "halving": study("halving", ps.SuccessiveHalving(max_budget=9), 12),
        "random": study("random", ps.Random(budget=5), 7),
        "asha": study("asha", ps.ASHA(max_budget=9, concurrency=4), 9),
    }
    engines = {name: engine_of(one, "together") for name, one in made.items()}
    turns = []
    while engines:
        for name, engine in list(engines.items()):
            wanted = engine.next()
            turns.append(name)
            if wanted.end is None:
                engine.take(engine.executor.wait(wanted.within))
            else:
                engine.close(wanted.end)
                engine.log.close()
                del engines[name]
    assert turns[:6] == ["halving", "random", "asha"] * 2
    for name, one in made.items():
        one.run(on=CLUSTER, progress=False)
        assert lines(Path("together") / name) == lines(Path(".penstock") / name)
