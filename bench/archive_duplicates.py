"""Near-duplicates found by their fingerprints: recall and precision over made pairs, as a table of distances.

Each film is cut into windows, which are decoded as segments of a film are. What should be found are the same windows of
copies of the film: encoded again, scaled, cropped, put between bars. What should not are all other windows, of other
films, and of the same film, where neighbours show the same scene a moment later. Windows of a scene in which nothing
moves are left out of these, as they do show the same.
"""

import argparse
import io
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
from av.container.output import OutputContainer
from av.filter import Graph
from av.option import Option  # noqa: F401
