"""How far predicted decode times are from measured ones. `make bench FIGURES=speed_model`.

The measured rows are three public data sets (see `fallow simulate --help` on where they are looked for): two sweeps of
today's engines on Hopper cards and on RTX 4090 and H100 PCIe, and one of a 2023 engine on A100 and H100. Repeats of one
configuration count once, by their median. Raw: the priors alone. Calibrated: constants fitted on even rows of each
(device, variant, engine), error on the odd ones.
"""

from __future__ import annotations

import csv
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agent.sizing.calibrate import UNCALIBRATED, Measurement, calibrate, predicted_s
from agent.sizing.devices import DEVICES
from agent.sizing.shape import ModelShape
from agent.sizing.speed import Load, SpeedModel
from marketplace.matching.simulate.traces import traces_folder

SILICON = "aiconfigurator_silicon_dense_hopper.csv"
SHAREGPT = "iog_vllm_sharegpt_measured.csv"
SPLITWISE = "splitwise_perf_model.csv"


def dense(parameters: float, layers: int, hidden: int, kv_heads: int, head: int, *, active: float = 0) -> ModelShape:
    """A model's shape from its published configuration; 16-bit weights and cache."""
    return ModelShape(
        weight_bytes=round(2 * parameters),
        parameters=round(parameters),
        active_parameters=round(active or parameters),
        layers=layers,
        hidden=hidden,
        feed_forward=4 * hidden,
        vocabulary=128_000,
        kv_elements_per_token=2 * layers * kv_heads * head,
        context_train=131_072,
    )


LLAMA_8B = dense(8.03e9, 32, 4096, 8, 128)
LLAMA_70B = dense(70.55e9, 80, 8192, 8, 128)
QWEN_32B = dense(32.76e9, 64, 5120, 8, 128)
QWEN_14B = dense(14.77e9, 48, 5120, 8, 128)
QWEN_7B = dense(7.62e9, 28, 3584, 4, 128)
QWEN_1B = dense(1.54e9, 28, 1536, 2, 128)
GPT_OSS = dense(116.8e9, 36, 2880, 8, 64, active=5.13e9)
SHAPES = {
    "Qwen3-32B": QWEN_32B,
    "gpt-oss-120b": GPT_OSS,
    "AceMath-7B-Instruct": QWEN_7B,
    "DeepSeek-R1-Distill-Qwen-1.5B": QWEN_1B,
    "DeepSeek-R1-Distill-Qwen-7B": QWEN_7B,
    "DeepSeek-R1-Distill-Qwen-14B": QWEN_14B,
    "DeepSeek-R1-Distill-Qwen-32B": QWEN_32B,
    "QwQ-32B-Preview": QWEN_32B,
    "gemma-2-9b-it": dense(9.24e9, 42, 3584, 8, 256),
    "phi-4": dense(14.66e9, 40, 5120, 10, 128),
    "llama2-70b": dense(68.98e9, 80, 8192, 8, 128),
    "bloom-176b": dense(176.2e9, 70, 14336, 112, 128),
}
CARDS = {
    "h100_sxm": "H100 SXM",
    "h200_sxm": "H200",
    "H100-PCIe": "H100 PCIe",
    "GeForce-RTX-4090": "RTX 4090",
    "a100-80gb": "A100-80 SXM",
    "h100-80gb": "H100 SXM",
    "h100-80gb-pcap": "H100 SXM",
}
WEIGHT_BYTES = {"": 2.0, "fp8": 1.0, "fp4": 0.55}


@dataclass(frozen=True, slots=True)
class Group:
    """What one set of constants describes."""

    file: str
    model: str
    card: str
    engine: str
    weight_bytes: float
    """A parameter."""

    @property
    def shape(self) -> ModelShape:
        name = self.model.rpartition("/")[2]
        shape = SHAPES.get(name) or (LLAMA_70B if "70B" in name else LLAMA_8B)
        # The mixture of experts was only ever published in four bits.
        width = WEIGHT_BYTES["fp4"] if shape is GPT_OSS else self.weight_bytes
        return replace(shape, weight_bytes=round(shape.parameters * width))


Groups = dict[Group, list[Measurement]]


def silicon(folder: Path) -> Groups:
    """Closed loop: `batch_size` requests run at any time."""
    found: dict[Group, dict[Any, list[float]]] = {}
    for row in _rows(folder / SILICON):
        precision = "fp8" if row["model_path"].endswith("FP8") else row["precision"]
        group = Group(SILICON, row["model_path"], CARDS[row["system"]], row["backend"], WEIGHT_BYTES[precision])
        load = Load(float(row["batch_size"]), int(row["isl"]), int(row["osl"]))
        _add(found, group, (load, int(float(row["tp_size"])), True), row["silicon_tpot_ms"])
    return _measurements(found)


def sharegpt(folder: Path) -> Groups:
    """Open loop: by Little's law, the sequences that ran are the tokens a second times the time of one."""
    found: dict[Group, dict[Any, list[float]]] = {}
    for row in _rows(folder / SHAREGPT):
        width = WEIGHT_BYTES["fp8" if "FP8" in row["model"] else ""]
        group = Group(SHAREGPT, row["model"], CARDS[row["gpu"]], "vllm", width)
        requests = int(row["n_prompts"])
        batch = max(1.0, float(row["out_tok_s"]) * float(row["tpot_p50_ms"]) / 1e3)
        load = Load(batch, int(row["input_tokens"]) / requests, int(row["output_tokens"]) / requests)
        _add(found, group, (load, int(row["gpus"]), True), row["tpot_p50_ms"])
    return _measurements(found)


def splitwise(folder: Path) -> Groups:
    """A fixed batch, prefilled together, then decoded together."""
    found: dict[Group, dict[Any, list[float]]] = {}
    for row in _rows(folder / SPLITWISE):
        group = Group(SPLITWISE, row["model"], CARDS[row["hardware"]], f"2023, {row['hardware']}", WEIGHT_BYTES[""])
        load = Load(float(row["batch_size"]), int(row["prompt_size"]), int(row["token_size"]))
        _add(found, group, (load, int(row["tensor_parallel"]), False), row["token_time"])
    return _measurements(found)


def _rows(path: Path) -> Iterator[dict[str, str]]:
    with path.open(newline="") as file:
        yield from csv.DictReader(file)


def _add(found: dict[Group, dict[Any, list[float]]], group: Group, key: Any, milliseconds: str) -> None:
    found.setdefault(group, defaultdict(list))[key].append(float(milliseconds) / 1e3)


def _measurements(found: dict[Group, dict[Any, list[float]]]) -> Groups:
    return {
        group: [
            Measurement(load, statistics.median(times), devices, mixed)
            for (load, devices, mixed), times in rows.items()
        ]
        for group, rows in found.items()
    }


def errors(groups: Groups, *, calibrated: bool) -> list[float]:
    """Relative error of each row; of the odd rows only, if calibrated on the even ones."""
    found: list[float] = []
    for group, rows in groups.items():
        device = DEVICES[group.card]
        constants = calibrate(group.shape, device, rows[::2]) if calibrated else UNCALIBRATED
        for row in rows[1::2] if calibrated else rows:
            model = SpeedModel(group.shape, device, row.devices, constants.efficiency)
            found.append(abs(predicted_s(model, row.load, mixed=row.mixed) / row.per_token_s - 1))
    return found


def measure() -> list[dict[str, Any]]:
    """Median errors in percent, over all rows and by data set; nothing, with a reason, where the data is absent."""
    folder = traces_folder()
    if folder is None or not all((folder / name).exists() for name in (SILICON, SHAREGPT, SPLITWISE)):
        print("speed_model: skipped, the measured rows are not on this machine (FALLOW_TRACES)", file=sys.stderr)
        return []
    sets = {"today": silicon(folder) | sharegpt(folder), "2023": splitwise(folder)}
    figures = []
    for name, calibrated in (("raw", False), ("calibrated", True)):
        found = {part: errors(groups, calibrated=calibrated) for part, groups in sets.items()}
        figures.append(_figure(f"speed_model.error_pct.{name}", [e for part in found.values() for e in part]))
        figures += [_figure(f"speed_model.error_pct.{name}.{part}", part_errors) for part, part_errors in found.items()]
    return figures


def _figure(name: str, found: Iterable[float]) -> dict[str, Any]:
    ordered = sorted(found)
    return {
        "figure": name,
        "value": round(100 * statistics.median(ordered), 2),
        "unit": f"% of the measured time per token, median of {len(ordered)} rows "
        f"(90% within {100 * ordered[int(0.9 * len(ordered))]:.0f}%)",
        "ratios": {},
    }


FIGURES = {"speed_model": measure}
