"""What the files of eth-easl/sailor have in common: names of GPU kinds."""

from collections.abc import Mapping
from types import MappingProxyType

# Their name to ours. What they call RTX-2080 is probably an RTX 2080 Ti (see planner/scenario/roofline.py).
KINDS: Mapping[str, str] = MappingProxyType(
    {
        "A100-40": "a100-40",
        "A100-80": "a100-80",
        "GH-96": "gh200-96",
        "RTX-2080": "rtx-2080",
        "RTX-3090": "rtx-3090",
        "Titan-RTX": "titan-rtx",
        "V100-16": "v100-16",
    }
)
