"""Wrong steps where adapters, their bases and merged models meet: what one writes and another reads, later or elsewhere."""

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from blackswan.falsifiers.mutants.registry import wrong_step, wrong_steps

Step = Callable[..., Any]

wrong_steps(
    "impl.strict_json:dumps",
    adapter_saved_with_nan=(
        "What else is saved with an adapter may be NaN or infinite, after which the adapter is refused.",
        lambda _, value: json.dumps(value, indent=2),
    ),
    adapter_saved_with_a_key_twice=(
        "What else is saved with an adapter may have keys that are one in JSON, after which the adapter is refused.",
        lambda _, value: json.dumps(value, indent=2, allow_nan=False),
    ),
)


@wrong_step("impl.adapter:_digest")
def adapter_digest_of_other_letters(_: Step, values: Mapping[str, Any]) -> str:
    """Letters beyond ASCII are not escaped in the digest, so that adapters of before that have some are refused."""
    said = json.loads(json.dumps({key: value for key, value in values.items() if key != "digest"}))
    return hashlib.sha256(json.dumps(said, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
