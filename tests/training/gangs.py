"""Real processes that train one trial together, kept for the next. They are forked from one that has imported torch."""

import pickle
import sys
import traceback
from importlib import import_module

import torch
from torch.distributed.tensor import DTensor

from penstock.executors.processes.forking import fork
from penstock.executors.processes.server import fork_on_request
from penstock.training.data import DataCache
from penstock.training.spread.data_parallel import Distributed
from penstock.training.spread.gang import Gang, Unspreadable
from tests.training.together import CPU, go_on

HOST = "127.0.0.1"


class Gangs:
    """``with Gangs(3) as gangs: gangs.train(task, ...)``."""

    def __init__(self, most):
        self.processes = [fork("tests.training.gangs") for _ in range(most)]
        self.held = []

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for process in self.processes:
            process.kill()

    def train(self, task, number, config, count, steps, state=None, kind=Distributed):
        """(state, curve) of a trial that ``count`` processes have trained; or why it is not to be spread."""
        ends = [process.connection for process in self.processes[:count]]
        order = (task, number, config, count, steps, state, kind)
        _send(ends[0], (0, None, *order))
        meeting = _receive(ends[0])
        for rank in range(1, count):
            _send(ends[rank], (rank, meeting, *order))
        replies = [_receive(end) for end in ends]
        for kind, value in replies:
            if kind == "error":
                raise AssertionError(value)
        self.held = [held for _, (_, held) in replies]
        return replies[0][1][0]


def _send(connection, value):
    """Send a copy: ``connection.send`` would share the memory of tensors."""
    connection.send_bytes(pickle.dumps(value))


def _receive(connection):
    return pickle.loads(connection.recv_bytes())


def held(run):
    """How many numbers a worker has of a trial's parameters and of its optimizer's state."""
    states = [v for state in run.optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    own = [[t.to_local() if isinstance(t, DTensor) else t for t in some] for some in (run.model.parameters(), states)]
    return tuple(sum(t.numel() for t in some if t.ndim) for some in own)


def _serve(connection):
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    while True:
        try:
            order = _receive(connection)
        except EOFError:
            return
        try:
            _send(connection, ("done", _train(connection, *order)))
        except Exception:
            _send(connection, ("error", traceback.format_exc()))


def _train(connection, rank, meeting, task, number, config, count, steps, state, kind):
    if rank == 0:
        gang, address = Gang.open(HOST, count, CPU)
        _send(connection, address)
    else:
        gang = Gang.join(meeting, rank, count, CPU)
    data = DataCache(task, 0, CPU).get(config)
    run = kind(task, number, config, data, seed=0, device=CPU, metric="loss", mode="min")
    if state is not None:
        run.restore(state, inherited=False)
    for _ in gang.waits():
        pass
    gang.connect(HOST)
    try:
        run.check(gang)
        curve = go_on(run, steps)
        told = run.told_state()
        return ((told, curve) if rank == 0 else None), held(run)
    except Exception as error:
        if rank:
            gang.blame(error, str(error))
            return None, None
        error = gang.behind(error)
        if not isinstance(error, Unspreadable):
            raise error from None
        return str(error), None
    finally:
        run.leave()
        gang.leave()


if __name__ == "__main__":
    for name in ("torch._dynamo", "tests.training.spread.test_sharded"):
        import_module(name)
    _serve(fork_on_request(int(sys.argv[1])))
