"""Makes `tests/data/transformers_logits.json` with Transformers on torch's CPU.

    python -m tests.make_transformers_logits

Run it again where a family or a case is added. It was made with transformers 5.23.0 and
torch 2.13.0, eager attention, fp32.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np

from tests.transformers_cases import CONFIGS, STORED, inputs_of, values_of


def main() -> None:
    """Writes the file."""
    found = {family: case(family) for family in CONFIGS}
    lines = [f"{json.dumps(name)}: {json.dumps(one)}" for name, one in found.items()]
    STORED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def case(family: str) -> dict:
    """Config and shapes as Transformers writes them, and logits of our values."""
    import transformers
    from safetensors import safe_open
    from safetensors.numpy import save_file

    kind = dict(CONFIGS[family])
    config = transformers.AutoConfig.for_model(kind.pop("model_type"), **kind)
    made = automatic(family).from_config(config)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made.save_pretrained(folder)
        file = folder / "model.safetensors"
        with safe_open(file, framework="numpy") as tensors:
            shapes = {
                one: tensors.get_slice(one).get_shape() for one in list(tensors.keys())
            }
        values = {one: values_of(family, one, shape) for one, shape in shapes.items()}
        save_file(values, file, metadata={"format": "pt"})
        logits = logits_of(folder, family)
        said = json.loads((folder / "config.json").read_text())
    # Of a text the last three tokens, which see all others.
    kept = logits if family == "vit" else logits[:, -3:]
    rounded = [float(f"{value:.7g}") for value in kept.reshape(-1)]
    return {"config": said, "shapes": shapes, "logits": rounded}


def automatic(family: str) -> type:
    """What loads a model of theirs."""
    import transformers

    if family == "vit":
        return transformers.AutoModelForImageClassification
    if family == "t5":
        return transformers.AutoModelForSeq2SeqLM
    return transformers.AutoModelForCausalLM


def logits_of(folder: Path, family: str) -> np.ndarray:
    """Of theirs, loaded from a folder; nothing missing and nothing unexpected."""
    import torch

    model, info = automatic(family).from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager"
    )
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    given = inputs_of(family)
    with torch.no_grad():
        if family == "vit":
            images = torch.tensor(given["images"]).permute(0, 3, 1, 2)
            return model.eval()(images).logits.numpy()
        if family == "t5":
            both = [torch.tensor(one).long() for one in given.values()]
            called = model.eval()(input_ids=both[0], decoder_input_ids=both[1])
            return called.logits.numpy()
        tokens = torch.tensor(given["tokens"]).long()
        return model.eval()(tokens).logits.float().numpy()


if __name__ == "__main__":
    main()
