"""Read a model from its Hugging Face config.json: the pattern of attention layers and states that its cache follows.

Nothing is guessed. A model type is read if `model_types` has a reader for it, and an error names a field that is
missing, or that may matter and is not read.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvplane.base.errors import InvalidArgument, NotFound
from kvplane_plan.models.config_fields import MAX_LAYERS, Fields
from kvplane_plan.models.model_types import PREDICTS_LIKE_LAST, READERS
from kvplane_plan.models.shapes import Full, Latent, Model

MAX_CONFIG_BYTES = 4 << 20


def read_model(path: Path) -> Model:
    """Read the model that the config.json at `path` describes.

    Raises:
        NotFound: the file cannot be read.
        InvalidArgument: the file is not a JSON object, or a field is missing, invalid or unsupported.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        what, remedy = f"{path} cannot be read: {error.strerror}", "name a model of the catalogue or a config.json"
        raise NotFound(what, field="model", remedy=remedy) from None
    if len(text) > MAX_CONFIG_BYTES:
        what = f"{path} has {len(text)} bytes, at most {MAX_CONFIG_BYTES} are read"
        raise InvalidArgument(what, field="model", remedy="name the model's config.json")
    return model_of(_json_object(text, str(path), "model"))


def parse_model(text: str) -> Model:
    """Return the model that the text of a config.json describes. Raises InvalidArgument for the field `config`, or one
    inside it.
    """
    config = _json_object(text, "it", "config")
    try:
        return model_of(config)
    except InvalidArgument as error:
        error.field = f"config.{error.field}"
        raise


def _json_object(text: str | bytes, name: str, field: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        remedy = "give the model's config.json"
        raise InvalidArgument(f"{name} is not JSON: {error}", field=field, remedy=remedy) from None
    if not isinstance(config, dict):
        raise InvalidArgument(f"{name} is not a JSON object", field=field, remedy="give the model's config.json")
    return config


def model_of(config: Mapping[str, Any]) -> Model:
    """Return the model that the fields of a config.json describe. Raises InvalidArgument that names a field."""
    fields = Fields.of_text_model(config)
    reader = READERS.get(fields.model_type)
    if reader is None:
        nearest = difflib.get_close_matches(fields.model_type[:40], READERS, n=1)
        similar = "".join(f"the most similar type that it reads is {one}; " for one in nearest)
        raise InvalidArgument(
            f"it is {repr(config.get('model_type'))[:40]}, which kvplane does not read",
            field="model_type",
            remedy=f"{similar}`kvplane models` lists all",
        )
    predicting = _prediction_layers(fields)
    pattern = reader(fields)
    fields.refuse_unread()
    knows = predicting and fields.model_type in PREDICTS_LIKE_LAST
    last = pattern[-1]
    mtp = last if knows and isinstance(last, Full | Latent) else None
    return Model(len(pattern), pattern, mtp=mtp, mtp_layers=predicting)


def _prediction_layers(fields: Fields) -> int:
    """Return the number of layers for multi-token prediction."""
    name = next((one for one in ("num_nextn_predict_layers", "mtp_num_hidden_layers") if fields.has(one)), "")
    return fields.size(name, least=0, most=MAX_LAYERS) if name else 0
