"""Read by every Python process that has this folder in `PYTHONPATH`."""

from tests.pretended_gpu import install

install()
