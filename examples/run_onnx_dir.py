"""Samples from a folder of `voicehub-aot export --format onnx-dir`: run_onnx_dir.py FOLDER REQUEST.npz RESULT.npy"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime


def classifier_free(branches, scales):
    """branches: the velocity of each, the conditional one first. scales: of the others."""
    return branches[0] + sum(scale * (branches[0] - other) for scale, other in zip(scales, branches[1:], strict=True))


def zero_star(branches, scales):
    """Classifier-free guidance against the unconditional velocity projected on the conditional one, row by row."""
    axes = tuple(range(1, branches[0].ndim))
    products = [np.sum(branches[1] * other, axes, keepdims=True) for other in branches]
    return branches[0] + scales[0] * (branches[0] - products[0] / (products[1] + 1e-8) * branches[1])


EQUATIONS = {"classifier_free": classifier_free, "zero_star": zero_star}


def lay_out(item, array, sizes, ends, pad):
    """The array at the request's sizes, with `pad` beyond each row's end. ends: dimension -> a number for each row."""
    whole = np.full([sizes.get(dim, dim) for dim in item["shape"]], pad, item["dtype"])
    whole[tuple(slice(size) for size in array.shape)] = array
    for axis, dim in enumerate(item["shape"]):
        for row, end in enumerate(ends.get(dim, ())):
            np.moveaxis(whole[row], axis - 1, 0)[end:] = pad
    return whole


def sample(folder, request, program=None, scales=None):
    """request: noise, conditioning and (optional) lengths by name, and step_noise where the program draws on its way.

    scales: of the guidance branches but the first. Returns the final state, shaped like the noise.
    """
    bundle = json.loads(Path(folder, "bundle.json").read_text(encoding="utf-8"))
    program = bundle["programs"][program or next(iter(bundle["programs"]))]
    stages, state, branches, guidance = (bundle[key] for key in ("stages", "state", "branches", "guidance"))
    given, sizes, ends, values = [state, *bundle["conditioning"]], {}, {}, {}
    for item in given:
        sizes = dict(zip(item["shape"], request[item["name"]].shape, strict=True)) | sizes
    for dim in bundle["dims"]:
        values[dim["length"]] = np.array(request.get(dim["length"], [sizes[dim["name"]]] * sizes["B"]))
        ends[dim["name"]] = values[dim["extent"]] = np.array(request.get(dim["extent"], values[dim["length"]]))
    values |= {item["name"]: lay_out(item, request[item["name"]], sizes, ends, item["pad"]) for item in given}
    packed = {name: np.concatenate([value] * len(branches)) for name, value in values.items()}
    packed |= {flag: np.repeat([branch["flags"][flag] for branch in branches], sizes["B"]) for flag in bundle["flags"]}
    tables = program["tables"]
    table = {
        t["name"]: np.memmap(Path(folder, t["file"]), t["dtype"], "r", t["offset"], (*t["shape"],)) for t in tables
    }
    known, registers = {"request": packed, "table": table}, {"x": values[state["name"]]}
    registers |= dict(zip(program["noises"], request.get("step_noise", []), strict=True))
    scales = guidance["scales"] if guidance and scales is None else scales
    sessions = {name: onnxruntime.InferenceSession(Path(folder, stage["file"])) for name, stage in stages.items()}

    def run(stage, evaluation=None):
        inputs = [(item, known[item["source"]][item["name"]]) for item in stages[stage]["inputs"]]
        feed = {item["name"]: value[evaluation] if item["by_evaluation"] else value for item, value in inputs}
        return dict(zip((o["name"] for o in stages[stage]["outputs"]), sessions[stage].run(None, feed), strict=True))

    known["prepare"] = run("prepare")
    for step in program["instructions"]:
        if step["op"] == "evaluate":
            known["state"] = {state["name"]: np.concatenate([registers[step["x"]]] * len(branches))}
            velocity = np.split(run("step", step["evaluation"])["velocity"], len(branches))
            named = [step["against"] is None or branch["name"] in step["against"] for branch in branches[1:]]
            used = [scale if taken else 0.0 for scale, taken in zip(scales or [], named, strict=True)]
            registers[step["out"]] = EQUATIONS[guidance["equation"]](velocity, used) if any(used) else velocity[0]
        else:
            registers[step["out"]] = sum(number * registers[name] for name, number in step["terms"])
    return lay_out(state, registers["x"], sizes, ends, 0)


if __name__ == "__main__":
    np.save(sys.argv[3], sample(sys.argv[1], dict(np.load(sys.argv[2]))))
