"""The family that a folder of an unknown `model_type` resembles, for the message that refuses it."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from ...refusals import quote
from ..families import FAMILIES
from ..families.fields import Raw
from .field_log import FieldLog

MAX_NAMED_FIELDS = 8
# Fields that describe no function: of training, generation and bookkeeping.
NEUTRAL_FIELDS = re.compile(
    r"model_type|architectures|auto_map|transformers_version|_.*|(torch_)?dtype|initializer_range|use_cache"
    r"|.*_token_id|.*drop(out)?(_prob)?|.*aux_loss.*|output_.*|pretraining_tp|quantization_config"
    r"|task_specific_params|return_dict|id2label|label2id|problem_type|is_(encoder_)?decoder"
    r"|tie_word_embeddings|chunk_size_feed_forward|finetuning_task"
)
CLASS_SUFFIX = re.compile(r"(ForCausalLM|LMHeadModel|ForConditionalGeneration|TextModel|Model)$")


class FamilyMatch(NamedTuple):
    """A family that can read the fields of another model. The nearest has the smallest tuple.

    is_other_class: False if `architectures` names a class of the family.
    unread_fields: fields with a meaning that the family does not read.
    """

    is_other_class: bool
    num_unread: int
    model_type: str
    unread_fields: tuple[str, ...]


def explain_nearest_family(raw: Raw) -> str:
    """Return a clause about the family whose fields resemble the `config.json` most; "" if none can read
    it."""
    nearest = min(match_families(raw), key=lambda match: match[:2], default=None)
    if nearest is None:
        return ""
    unread = ", ".join(nearest.unread_fields[:MAX_NAMED_FIELDS])
    if more := nearest.num_unread - MAX_NAMED_FIELDS:
        unread += f" and {more} more" if more > 0 else ""
    differing = f"which does not read {unread}" if unread else "which reads all of its fields"
    attempt = f'hf_overrides={{"model_type": "{nearest.model_type}"}}'
    return f"; the nearest is {nearest.model_type!r}, {differing}: {attempt} tries it"


def match_families(raw: Raw) -> Iterator[FamilyMatch]:
    """Yield the families that accept the fields, in the order of the table."""
    name = class_stem(raw)
    for model_type, family in FAMILIES.items():
        log = FieldLog(raw, set())
        try:
            family.parse_config(log)
        except (ValueError, ArithmeticError):
            continue
        unread = tuple(field for field in raw if field not in log.names and has_meaning(raw, field))
        yield FamilyMatch(name != model_type.replace("_", ""), len(unread), model_type, unread)


def has_meaning(raw: Raw, field: str) -> bool:
    """Return True unless a field is null or one of `NEUTRAL_FIELDS`."""
    return raw[field] is not None and not NEUTRAL_FIELDS.fullmatch(field)


def class_stem(raw: Raw) -> str:
    """Return the name of the first class in `architectures` without its suffix, in small letters."""
    stated: Any = raw.get("architectures")
    first = stated[0] if isinstance(stated, list) and stated and isinstance(stated[0], str) else ""
    return CLASS_SUFFIX.sub("", first).lower()


def unknown_family_error(raw: Raw) -> ValueError:
    """Return the error of a `model_type` that is not supported."""
    return ValueError(
        f"model_type is {quote(raw.get('model_type'))}, expected one of {', '.join(FAMILIES)}"
        f"{explain_nearest_family(raw)}"
    )
