"""What setup.cfg cannot say: the loops in C. Without a compiler Atoll installs and runs all the same, more slowly."""

import re
import zlib
from pathlib import Path

from setuptools import Extension, setup

SOURCE = Path("peer/outer/numerics/kernels.c")
text = SOURCE.read_bytes()
flags = re.search(rb"^ *flags: (.+)$", text, re.MULTILINE)[1].decode().split()  # part of what the library is made of

setup(
    ext_modules=[
        Extension(
            "peer.outer.numerics._kernels",
            [str(SOURCE)],
            depends=["setup.py"],
            define_macros=[("SOURCE_CRC32", f"{zlib.crc32(text)}ul")],
            extra_compile_args=flags,
            optional=True,
        )
    ]
)
