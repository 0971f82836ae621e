"""Bad input that is made of good input is bad whatever is drawn."""

import json
from pathlib import Path

import numpy as np
import pytest

from blackswan.falsifiers.numeric.checks.refusals import truncate


@pytest.mark.parametrize("content", ['{"hidden_size": 4}\n', "{}\n\n  \n", "{}"])
def test_a_truncated_file_is_not_whole(content: str, tmp_path: Path) -> None:
    path, left = tmp_path / "config.json", set()
    for seed in range(200):
        path.write_text(content)
        truncate(path, np.random.default_rng(seed))
        left.add(path.read_text())
        with pytest.raises(json.JSONDecodeError):
            json.loads(path.read_text())
    assert left == {content[:length] for length in range(len(content.rstrip()))}
