"""Writes ``samples/``: what honest people pickle with packages that the tests don't install.

Run in an environment of its own: ``pip install scikit-learn gymnasium torchao torch==2.13.0``, and for gym
``PYTHONPATH`` with the source of gym 0.23.1, the last that has a generator of random numbers of its own.
"""

from __future__ import annotations

import pickle
import sys
import warnings
from pathlib import Path
from typing import Any

SAMPLES = Path(__file__).with_name("samples")


def sklearn_values() -> dict[str, Any]:
    import numpy as np
    from sklearn import ensemble, linear_model, neighbors, pipeline, preprocessing, tree

    random = np.random.RandomState(0)
    x = random.rand(30, 2)
    y = (x[:, 0] > 0.5).astype(int)
    three = np.digitize(x[:, 0], [0.3, 0.6])
    scaled = pipeline.make_pipeline(preprocessing.StandardScaler(), linear_model.LogisticRegression())
    return {
        "sklearn-pipeline": scaled.fit(x, y),
        "sklearn-tree": tree.DecisionTreeClassifier().fit(x, y),
        "sklearn-forest": ensemble.RandomForestClassifier(2).fit(x, y),
        "sklearn-boosting": ensemble.GradientBoostingClassifier(n_estimators=1).fit(x, y),
        "sklearn-boosting-3": ensemble.HistGradientBoostingClassifier(max_iter=1).fit(x, three),
        "sklearn-sgd": linear_model.SGDClassifier(max_iter=3, tol=None).fit(x, y),
        "sklearn-kd-tree": neighbors.KNeighborsClassifier(algorithm="kd_tree").fit(x, y),
        "sklearn-ball-tree": neighbors.KNeighborsClassifier(algorithm="ball_tree", metric="l1").fit(x, y),
    }


def gymnasium_values() -> dict[str, Any]:
    from gymnasium import spaces

    box = spaces.Box(-1, 1, (2,))
    found = {
        "act": spaces.Tuple((spaces.Discrete(4), spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(3))),
        "obs": spaces.Dict({"a": box, "text": spaces.Text(3), "list": spaces.Sequence(spaces.Discrete(2))}),
        "graph": spaces.Graph(box, spaces.Discrete(2)),
    }
    for space in found.values():
        space.seed(1)
    return {"gymnasium": found}


def gym_values() -> dict[str, Any]:
    import numpy as np

    np.bool8 = np.bool_  # which gym asks NumPy for, and NumPy has no more
    from gym import spaces

    found = {"obs": spaces.Box(-1, 1, (2,)), "act": spaces.Discrete(4)}
    for space in found.values():
        space.seed(1)
    return {"gym": found}


def torchao_values() -> dict[str, Any]:
    import torch
    from torchao import quantization
    from torchao.optim import AdamW8bit

    found = {}
    for kind in ("Int8DynamicActivationInt8Weight", "Float8WeightOnly", "IntxWeightOnly"):
        net = torch.nn.Sequential(torch.nn.Linear(32, 16, bias=False))
        quantization.quantize_(net, getattr(quantization, f"{kind}Config")())
        found[f"torchao-{kind}"] = net.state_dict()
    net = torch.nn.Linear(64, 64, bias=False)
    optimizer = AdamW8bit(net.parameters(), block_size=64)
    net(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    return {**found, "torchao-AdamW8bit": optimizer.state_dict()}


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    SAMPLES.mkdir(exist_ok=True)
    for name in names:
        for stem, value in globals()[f"{name}_values"]().items():
            if name == "torchao":
                import torch

                torch.save(value, SAMPLES / f"{stem}.pt")
                continue
            for protocol in (2, 4):
                (SAMPLES / f"{stem}-{protocol}.pkl").write_bytes(pickle.dumps(value, protocol))


if __name__ == "__main__":
    main(sys.argv[1:])
