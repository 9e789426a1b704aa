"""Builds the native CPU kernels where there is a compiler; without one, plain torch serves."""

from pathlib import Path

from setuptools import Extension, setup

SOURCES = Path("kernels/cpu/src")

setup(
    ext_modules=[
        # A plain shared library that kernels.cpu.library opens; it needs no header of Python's.
        Extension(
            "kernels.cpu._native",
            sources=sorted(str(source) for source in SOURCES.glob("*.cpp")),
            depends=sorted(str(header) for header in SOURCES.glob("*.hpp")),
            language="c++",
            extra_compile_args=[
                "-std=c++17",
                "-O3",
                "-g0",
                "-pthread",
                "-fvisibility=hidden",
                # Whether a product and a sum are fused must not depend on the code around them.
                "-ffp-contract=off",
                "-fno-math-errno",
                "-Wno-ignored-attributes",
            ],
            extra_link_args=["-pthread"],
            optional=True,
        )
    ]
)
