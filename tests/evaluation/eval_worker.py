"""Evaluates in processes that are meant to be killed: one JSON order per line, one exit code per line back.

Forking spares every order but the first the seconds it takes to import torch.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from flatrock.core.threat import Linf
from flatrock.data.catalog import load_data
from flatrock.evaluation.evaluate import evaluate
from flatrock.models.catalog import create_model


@cache
def question() -> dict[str, Any]:
    """A network after a little training, and digits it has not seen; made once, before the children are forked."""
    train, test = load_data("digits", "train"), load_data("digits", "test")
    model = create_model("digits_cnn", seed=1).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for rows in torch.split(torch.arange(len(train)), 64):
        optimizer.zero_grad()
        F.cross_entropy(model(train.images(rows)), train.y[rows]).backward()
        optimizer.step()
    x, y = test.images(torch.arange(60)), test.y[:60]
    return {"model": model.eval(), "x": x, "y": y, "threat": Linf(0.1), "batch_size": 7, "keep_adversarial": True}


def obey(order: dict[str, Any]) -> int:
    result = evaluate(
        **question(), attacks=order["attacks"], journal=Path(order["journal"]), resume=order["resume"], seed=3
    )
    torch.save({"flags": result.flags, "x_adv": result.adversarial, "margins": result.margins}, order["answer"])
    return 0


def main() -> None:
    torch.set_num_threads(1)
    os.fsync = lambda descriptor: None
    question()
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = obey(order)
            finally:
                os._exit(code)
        if order.get("chunks") is not None:  # kill once so many chunks are on disk, and a little later
            while len(list(Path(order["journal"]).glob("chunk-*.safetensors"))) < order["chunks"]:
                if os.waitpid(pid, os.WNOHANG)[0]:
                    break
                time.sleep(0.0005)
            else:
                time.sleep(order["later"])
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            code = -9
        else:
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        sys.stdout.write(f"{code}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
