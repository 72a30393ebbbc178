"""Joules of a model step: fused, one trial after another, and by hand; do trials and idle add up to the counter?

    python bench/joules.py [--network rn18/8 --network mlp512] [--trials 128] [--alone 4] [--units 20] [--copies 25]
                           [--seconds 5]
    python bench/joules.py --tiny    # on a CPU, with a fake of NVML that follows the clock: no claim, but that it runs

On a GPU this needs nvidia-ml-py (pip install 'penstock[gpu]'). Nothing is set there: the setter raises, and studies
only observe. Each study is whole, as users get it, with --precision bf16 or fp32. The counter is read by itself before
and after, and what the study tells of its trials and of idle time is compared with it. "last half" leaves out the units
in which sizes are measured and a faster step is made; "whole" is the study's trials with all of that. "by hand" is
the loop that people write without Penstock, one trial after another: eager PyTorch, its data on the device, a forward,
a backward and an optimizer step for each batch, and a validation each epoch; for --seconds, after some steps that do
not count. Penstock's own "solo" captures its step where that is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["PENSTOCK_OBSERVE_ONLY"] = "1"  # before anything can set a device's limit
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

import penstock as ps
from bench.fused_study import longer
from bench.networks import TASKS, Images
from penstock.energy.meter import CHOSEN
from penstock.energy.nvml import Gpu
from penstock.log import events, reader

WARM = 20  # steps by hand before the counter is read


def fake(folder: str) -> str:
    """A fake device of 400 W, which meters this machine's CPU; gives its UUID."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fake_nvml"))
    import pynvml

    assert pynvml.FAKE
    os.environ["FAKE_NVML"] = folder
    uuid: str = pynvml.make(folder, draw=400.0)
    os.environ[CHOSEN] = f"nvml:{uuid}"
    return uuid


def measured(task: ps.Task, name: str, gpu: Gpu, trials: int, units: int, sharing: str) -> dict[str, Any]:
    """A study's joules: of its steps, and against the counter."""
    space = {
        key: ps.loguniform(value / 3, value * 3) if key == "lr" else value for key, value in TASKS[name][1].items()
    }
    aim: Any = {"metric": "accuracy"} if isinstance(task, Images) else {"metric": "loss", "mode": "min"}
    with tempfile.TemporaryDirectory() as dir:
        study = ps.Study(task, space, **aim, algorithm=ps.Random(budget=units), trials=trials, dir=dir, name="s")
        began, before = time.perf_counter(), gpu.joules()
        result = study.run(progress=False, sharing=sharing, power="observe")
        counted, seconds = gpu.joules() - before, time.perf_counter() - began
        log = list(reader.read(Path(dir) / "s" / "log.jsonl"))
    joules, steps = defaultdict[int, float](float), defaultdict[int, int](int)
    for event in log:
        if isinstance(event, events.Reported):
            joules[event.unit] += event.usage.joules or 0.0
            steps[event.unit] += event.usage.steps
    late = [unit for unit in steps if unit > units // 2]
    lines = [event for event in log if isinstance(event, events.Metered)]
    used, idle = sum(trial.joules or 0.0 for trial in result.trials), sum(line.idle for line in lines)
    found = [event for event in log if isinstance(event, events.Limited)]
    return {
        "network": name,
        "sharing": sharing,
        "trials": trials,
        "units": units,
        "steps": sum(steps.values()),
        "seconds": seconds,
        "counter": counted,
        "used": used,
        "idle": idle,
        "apart": (used + idle) / counted - 1,
        "watts": counted / seconds,
        "most_watts": max((line.most for line in lines), default=0.0),
        "limit": next((line.limit for line in lines), None),
        "meter": next((line.meter for line in lines), ""),
        "step": used / sum(steps.values()),
        "late_step": sum(joules[unit] for unit in late) / sum(steps[unit] for unit in late),
        "observed": [vars(event) for event in found],
    }


def by_hand(task: ps.Task, name: str, gpu: Gpu, seconds: float) -> dict[str, Any]:
    """The joules of a step of the plain loop, by the counter alone."""
    config, device = TASKS[name][1], torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train, valid = ([part.to(device) for part in some] for some in task.data(config))
    torch.manual_seed(0)
    model = task.model(config).to(device)
    optimizer = task.optimizer(model.parameters(), config)
    mixed = torch.autocast(device.type, torch.bfloat16, enabled=task.precision == "bf16")

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    def epochs() -> Iterator[None]:
        while True:
            model.train()
            for rows in torch.randperm(len(train[0]), device=device).split(task.batch_size):  # type: ignore[no-untyped-call]
                optimizer.zero_grad()
                with mixed:
                    loss = task.loss(model, tuple(part[rows] for part in train), config)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                yield
            model.eval()
            with torch.no_grad(), mixed:
                batches = zip(*(part.split(task.eval_batch_size) for part in valid), strict=True)
                told = [{k: float(v) for k, v in task.metrics(model, one, config).items()} for one in batches]
            assert told

    steps, taken = epochs(), 0
    for _ in range(WARM):
        next(steps)
    wait()
    began, before = time.perf_counter(), gpu.joules()
    while time.perf_counter() - began < seconds:
        next(steps)
        taken += 1
    wait()
    joules, took = gpu.joules() - before, time.perf_counter() - began
    return {
        "network": name,
        "sharing": "by hand",
        "steps": taken,
        "seconds": took,
        "counter": joules,
        "step": joules / taken,
        "watts": joules / took,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", action="append", choices=sorted(TASKS))
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--trials", type=int, default=128)
    parser.add_argument("--alone", type=int, default=4, help="trials one after another")
    parser.add_argument("--units", type=int, default=20)
    parser.add_argument("--copies", type=int, default=25)
    parser.add_argument("--seconds", type=float, default=5.0, help="of the loop by hand")
    parser.add_argument("--tiny", action="store_true", help="on a CPU, with a fake of NVML")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    networks = args.network or (["mlp512"] if args.tiny else ["rn18/8", "mlp512"])
    if args.tiny:
        args.trials, args.alone, args.units, args.copies, args.precision = 4, 2, 2, 1, "fp32"
        args.seconds = 0.5
    with tempfile.TemporaryDirectory() as folder:
        uuid = fake(folder) if args.tiny else f"GPU-{torch.cuda.get_device_properties(0).uuid}"
        gpu, rows, plain = Gpu(uuid), [], dict[str, dict[str, Any]]()
        for name in networks:
            task = longer(name, args.precision, args.copies)
            plain[name] = by_hand(task, name, gpu, args.seconds)
            if args.json:
                print(json.dumps(plain[name]), flush=True)
            for sharing, trials in (("solo", args.alone), ("fused", args.trials)):
                row = measured(task, name, gpu, trials, args.units, sharing)
                rows.append(row)
                if args.json:
                    print(json.dumps(row), flush=True)
    if args.json:
        return
    place = "a fake device" if args.tiny else torch.cuda.get_device_name(0)
    print(f"{place}, {rows[0]['meter']}, limit {rows[0]['limit']} W, {args.precision}, {args.units} units a trial")
    print(
        f"{'':16}{'trials':>8}{'steps':>9}{'seconds':>9}{'J a step':>10}{'last half':>11}{'watts':>8}"
        f"{'trials J':>11}{'idle J':>9}{'counter J':>11}{'apart':>8}"
    )
    for row in rows:
        print(
            f"{row['network'] + ' ' + row['sharing']:16}{row['trials']:8}{row['steps']:9}{row['seconds']:9.1f}"
            f"{row['step']:10.4f}{row['late_step']:11.4f}{row['watts']:8.0f}{row['used']:11.0f}{row['idle']:9.0f}"
            f"{row['counter']:11.0f}{row['apart']:+8.2%}"
        )
    for name, one in plain.items():
        took = f"{one['steps']:17}{one['seconds']:9.1f}{one['step']:10.4f}{one['watts']:19.0f}"
        print(f"{name + ' by hand':16}{took}")
    for solo, fused in zip(rows[::2], rows[1::2], strict=True):
        whole, late = fused["step"] / solo["step"], fused["late_step"] / solo["late_step"]
        hand = plain[solo["network"]]["step"]
        print(
            f"{solo['network']}: fused takes {whole:.3f} of the joules a step of solo, {late:.3f} in the last half; "
            f"{fused['step'] / hand:.3f} of the loop's by hand, {fused['late_step'] / hand:.3f} in the last half; "
            f"solo takes {solo['step'] / hand:.3f} of the loop's"
        )
        for line in fused["observed"]:
            print(f"  {line['reason']}")


if __name__ == "__main__":
    main()
