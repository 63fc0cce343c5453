"""What is `inside` runs in processes that have the device, which `test_inside` starts."""

from tests.pretended_gpu import is_installed

collect_ignore = [] if is_installed() else ["inside"]
