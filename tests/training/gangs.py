"""Real processes that train one trial together, kept for the next."""

import multiprocessing
import traceback
from copy import deepcopy

import torch
from torch.distributed.tensor import DTensor

from penstock.training.data import DataCache
from penstock.training.spread.data_parallel import Distributed
from penstock.training.spread.gang import Gang, Unspreadable
from tests.training.together import CPU, go_on

HOST = "127.0.0.1"


class Gangs:
    """``with Gangs(3) as gangs: gangs.train(task, ...)``."""

    def __init__(self, most):
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(most)]
        self.ends = [ours for ours, _ in pipes]
        self.processes = [context.Process(target=_serve, args=(theirs,), daemon=True) for _, theirs in pipes]
        for process in self.processes:
            process.start()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for process in self.processes:
            process.kill()
            process.join()

    def train(self, task, number, config, count, steps, state=None, kind=Distributed):
        """(state, curve) of a trial that ``count`` processes have trained; or why it is not to be spread."""
        order = (task, number, config, count, steps, state, kind)
        self.ends[0].send((0, None, *order))
        meeting = self.ends[0].recv()
        for rank in range(1, count):
            self.ends[rank].send((rank, meeting, *order))
        replies = [end.recv() for end in self.ends[:count]]
        for kind, value in replies:
            if kind == "error":
                raise AssertionError(value)
        self.held = [held for _, (_, held) in replies]
        return replies[0][1][0]


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
            order = connection.recv()
        except EOFError:
            return
        try:
            connection.send(("done", _train(connection, *order)))
        except Exception:
            connection.send(("error", traceback.format_exc()))


def _train(connection, rank, meeting, task, number, config, count, steps, state, kind):
    if rank == 0:
        gang, address = Gang.open(HOST, count, CPU)
        connection.send(address)
    else:
        gang = Gang.join(meeting, rank, count, CPU)
    data = DataCache(task, 0, CPU).get(config)
    run = kind(task, number, config, data, seed=0, device=CPU, metric="loss", mode="min")
    if state is not None:
        run.restore(deepcopy(state), inherited=False)  # processes share the memory of what they are sent
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
