"""Optuna's plots of a result, written as pages that a browser opens; and the result as a table.

    python examples/plots.py

``result.optuna_study()`` is the study as Optuna sees it: Optuna's plots, its importances and all other tools that read
an Optuna study work with it. Plots and tables need ``pip install 'penstock[plots]'``.
"""

from typing import Any

import optuna
import torch
from sklearn.datasets import load_digits
from torch import nn

import penstock as ps

images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)


def softmax(trial: Any) -> None:
    """Softmax regression, five epochs; never paused, so it saves no state."""
    config = trial.config
    model, loss = nn.Linear(64, 10), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=config["lr"], momentum=config["momentum"], weight_decay=config["weight_decay"]
    )
    for epoch in range(1, 6):
        for rows in torch.split(torch.randperm(1437), config["batch_size"]):
            optimizer.zero_grad()
            loss(model(x[rows]), y[rows]).backward()
            optimizer.step()
        with torch.no_grad():
            accuracy = (model(x[1437:]).argmax(-1) == y[1437:]).float().mean()
        trial.report(epoch, accuracy=accuracy)


study = ps.Study(
    softmax,
    {
        "lr": ps.loguniform(1e-3, 10),
        "momentum": ps.uniform(0, 0.99),
        "weight_decay": ps.loguniform(1e-6, 1e-1),
        "batch_size": ps.choice([32, 64, 128]),
    },
    metric="accuracy",
    algorithm=ps.Random(budget=5),
    trials=40,
)

if __name__ == "__main__":
    result = study.run()
    print(result.dataframe().sort_values("accuracy", ascending=False).head())
    seen = result.optuna_study()
    for plot in (
        optuna.visualization.plot_optimization_history,
        optuna.visualization.plot_slice,
        optuna.visualization.plot_parallel_coordinate,
        optuna.visualization.plot_param_importances,
    ):
        page = result.dir / f"{plot.__name__}.html"
        plot(seen).write_html(page)
        print("wrote", page)
