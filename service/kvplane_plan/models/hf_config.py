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
_SCHEMES = ("kv_cache_scheme", "kv_cache_quant_algo")  # in the order in which vLLM reads them


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
    dtype, longest = _checkpoint_dtype(config), _longest(fields)
    return Model(len(pattern), pattern, mtp=mtp, mtp_layers=predicting, cache_dtype=dtype, max_model_len=longest)


def _longest(fields: Fields) -> int:
    """Return the tokens that the model has positions for, 0 if it does not say; a scaling may add some (YaRN)."""
    longest = fields.get("max_position_embeddings", fields.get("n_positions", 0))
    scaling = fields.get("rope_scaling", fields.get("rope_parameters"))
    factor = scaling.get("factor", 1) if isinstance(scaling, dict) and "original_max" not in str(scaling) else 1
    return int(longest * max(1, factor)) if isinstance(longest, int) and isinstance(factor, int | float) else 0


def _checkpoint_dtype(config: Mapping[str, Any]) -> str:
    """Return the data type of keys and values that the checkpoint was quantized for, "" if none: as vLLM 0.33 resolves
    `--kv-cache-dtype auto`. Raises InvalidArgument for one that kvplane does not plan.
    """
    texts = [one for one in config.values() if isinstance(one, dict) and "model_type" in one]
    for place in (config, *texts):
        for name in ("quantization_config", "compression_config"):
            if isinstance(given := place.get(name), dict):
                found = _quantized(given, given.get("quantization", given), f"{name}.", place is config)
                if found is not None:
                    return found
    return ""


def _quantized(given: Mapping[str, Any], inner: object, path: str, is_whole: bool) -> str | None:
    method = str(given.get("quant_method") or "")
    places = (inner if isinstance(inner, dict) else {}, given)
    schemes = [(f"{path}{name}", one.get(name)) for name in _SCHEMES for one in places if one.get(name)]
    if not schemes or not method:
        return None
    field, scheme = schemes[0]
    if method == "compressed-tensors" and field.endswith("kv_cache_scheme"):
        return "fp8"
    if method.startswith("modelopt") and is_whole:
        if isinstance(scheme, dict):
            names = {"8": "fp8" if scheme.get("dynamic") is False else "", "4": "nvfp4"}
            scheme = names.get(str(scheme.get("num_bits")), "") if scheme.get("type") == "float" else ""
        if str(scheme).lower() in ("fp8", ""):
            return str(scheme).lower()
    raise InvalidArgument(
        f"the checkpoint's {method[:40]} says {repr(scheme)[:40]} for the cache, which kvplane does not plan",
        field=field,
        remedy="give --cache-dtype, and remove the field",
    )


def _prediction_layers(fields: Fields) -> int:
    """Return the number of layers for multi-token prediction."""
    name = next((one for one in ("num_nextn_predict_layers", "mtp_num_hidden_layers") if fields.has(one)), "")
    return fields.size(name, least=0, most=MAX_LAYERS) if name else 0
