"""What setup.cfg cannot say: the loops in C. Without a compiler Atoll installs and runs all the same, more slowly."""

import zlib
from pathlib import Path

from setuptools import Extension, setup

SOURCE = "peer/outer/kernels.c"

setup(
    ext_modules=[
        Extension(
            "peer.outer._kernels",
            [SOURCE],
            define_macros=[("SOURCE_CRC32", f"{zlib.crc32(Path(SOURCE).read_bytes())}ul")],
            # One rounding an operation, as `peer/outer/kernels.py` promises: no contraction, no -ffast-math.
            extra_compile_args=["-std=c11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"],
            optional=True,
        )
    ]
)
