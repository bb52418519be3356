"""The lengths and sharing of the synthetic datasets, as a table for docs/benchmarks.md.

python benchmarks/synthetic_datasets.py [--num-prompts 1000]
"""

from __future__ import annotations

import argparse

import numpy as np

from quire.workload.datasets import DATASETS, make_requests
from quire.workload.options import DatasetOptions


def row(name: str, num: int) -> str:
    requests = make_requests(DatasetOptions(dataset_name=name, num_prompts=num))
    cells = [f"`{name}`"]
    for attribute in ("prompt_len", "output_len"):
        values = np.array([getattr(request, attribute) for request in requests])
        cells.append(f"{values.mean():.0f} / {np.median(values):.0f} / {values.max()}")
    shared = sum(request.shared_prefix for request in requests)
    cells.append(f"{shared / sum(request.prompt_len for request in requests):.0%}")
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-prompts", type=int, default=1000)
    count = parser.parse_args().num_prompts
    print("| Name | prompt: mean / median / longest | output | shared |\n|---|---|---|---|")
    for dataset in DATASETS:
        if dataset.startswith("synthetic-"):
            print(row(dataset, count))
